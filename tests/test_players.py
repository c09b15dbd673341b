"""The rule-based players walk shortest paths, choose ties uniformly and play by the probabilities they publish."""

import dataclasses

from benchmarks.unseen import KINDS
from evaluation.strangers import STRANGER_PROBS
from stag_hunt_env import FAR, PLAYER_PROBS, StagHuntConfig, StagHuntEnv, sample

import pytest
import reference_game as reference
import torch
from helpers import chi_square_p, games_of, mixed_actions, random_kinds, seeded

BOARDS = [
    StagHuntConfig(height=4, width=7, num_stags=2),
    StagHuntConfig(height=6, width=7, num_players=5, num_stags=2, num_hares=2, max_wall_pieces=3),
    StagHuntConfig(height=3, width=4, num_players=3, num_stags=0, num_hares=2),
    StagHuntConfig(height=2, width=4, num_players=3, num_stags=0, num_hares=0),
    StagHuntConfig(height=1, width=9, num_players=2, num_stags=2, num_hares=2),
]
HUNTS = {"nearest_stag": 5, "nearest_hare": 6}


def states_along_games(config, games=6, seed=1):
    """States of whole games, with players that left and prey that was caught"""
    env, generator = StagHuntEnv(config, games, seed=seed), seeded(seed)
    state, kinds = env.initial_state(), random_kinds(env, generator)
    for step in range(20):
        if step % 4 == 0:
            yield env, state
        state, *_ = env.transition(state, mixed_actions(env, state, kinds, 0.2, generator))


def stranger_probs(config, game, seat, name):
    """[7] by the plain-Python game"""
    stags = [cell for p, cell in enumerate(game.prey) if game.alive[p] and reference.hunted_by(config, p) == 5]
    if name == "left_stag":
        column = min((cell % config.width for cell in stags), default=0)
        others = [p for p, cell in enumerate(game.prey) if p < config.num_stags and cell % config.width != column]
        alive = [game.alive[p] and p not in others for p in range(config.num_prey)]
        return reference.player_probs(config, dataclasses.replace(game, alive=alive), seat, "nearest_stag")
    if name != "waiting":
        pure = reference.player_probs(config, game, seat, name.replace("noisy", "nearest"))
        noise = reference.player_probs(config, game, seat, "random")
        return [0.8 * p + 0.2 * q for p, q in zip(pure, noise, strict=True)]
    if not stags or not game.present[seat] or game.position[seat] in stags:
        return [float(action == 4) for action in range(7)]
    return reference.player_probs(config, game, seat, "nearest_stag")


def unseen_probs(config, game, seat, name):
    """[7] by the plain-Python game"""
    stag, hare, at_random = (
        reference.player_probs(config, game, seat, name) for name in ("nearest_stag", "nearest_hare", "random")
    )
    living = {
        prey: [cell for p, cell in enumerate(game.prey) if game.alive[p] and reference.hunted_by(config, p) == prey]
        for prey in (5, 6)
    }
    away = {prey: reference.distances(config, game, cells) for prey, cells in living.items()}
    if name == "slow_stag":
        return [(p + (action == 4)) / 2 for action, p in enumerate(stag)]
    if name == "wanderer":
        hunts = [action for action in (5, 6) if at_random[action]]
        return [float(action in hunts) for action in range(7)] if hunts else at_random
    if name == "far_hare":
        from_stag = [away[5].get(cell, FAR) for cell in living[6]]
        alive = [
            game.alive[p] and (cell not in living[6] or away[5].get(cell, FAR) == max(from_stag))
            for p, cell in enumerate(game.prey)
        ]
        return reference.player_probs(config, dataclasses.replace(game, alive=alive), seat, "nearest_hare")
    place = game.position[seat]
    others = [game.position[i] for i in range(config.num_players) if i != seat and game.present[i]]
    wants_stag = {
        "gives_up": game.time < 12,
        "cautious": away[5].get(place, FAR) <= away[6].get(place, FAR),
        "contrarian": all(away[5].get(cell, FAR) > 1 for cell in others),
    }
    return stag if wants_stag[name] else hare


@pytest.mark.parametrize("config", BOARDS)
def test_probabilities_are_those_of_breadth_first_search(config):
    """Also of strangers, each by what it is named for"""
    absent = False
    for env, state in states_along_games(config):
        games = games_of(state)
        legal = env.legal_actions(state)
        absent |= not bool(state.present.all())
        plain_probs = dict.fromkeys(STRANGER_PROBS, stranger_probs) | dict.fromkeys(KINDS, unseen_probs)
        for name, probs in (PLAYER_PROBS | KINDS).items():
            plain = plain_probs.get(name, reference.player_probs)
            expected = [[plain(config, game, seat, name) for seat in range(config.num_players)] for game in games]
            torch.testing.assert_close(probs(env, state, legal), torch.tensor(expected), atol=1e-6, rtol=0)
    assert absent or config.num_prey == 0


@pytest.mark.parametrize("config", BOARDS)
def test_distance_to_prey_is_that_of_breadth_first_search(config):
    for env, state in states_along_games(config):
        for hunt in HUNTS.values():
            ours = env.distance_to_prey(state, hunt)
            for b, game in enumerate(games_of(state)):
                targets = [
                    c for p, c in enumerate(game.prey) if game.alive[p] and reference.hunted_by(config, p) == hunt
                ]
                expected = reference.distances(config, game, targets)
                free = [cell for cell in range(config.num_cells) if cell not in game.walls]
                assert [int(ours[b, cell]) for cell in free] == [expected.get(cell, FAR) for cell in free]


def test_sample_follows_the_probabilities():
    probs = torch.tensor([[0, 0.5, 0, 0.25, 0.125, 0.125, 0], [0, 0, 0, 0, 1.0, 0, 0], [1 / 7] * 7])
    actions = sample(probs.expand(20_000, 3, 7), seeded(8))
    assert actions.shape == (20_000, 3) and actions.dtype == torch.int64
    counts = [torch.bincount(actions[:, row], minlength=7) for row in range(3)]
    assert counts[0][probs[0] == 0].sum() == 0 and counts[1][4] == 20_000
    assert chi_square_p(counts[0][probs[0] > 0], probs[0][probs[0] > 0]) > 1e-3
    assert chi_square_p(counts[2]) > 1e-3
    assert torch.equal(actions, sample(probs.expand(20_000, 3, 7), seeded(8)))


def test_sample_draws_nothing_impossible_where_the_noise_is_zero(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda x, **_: x.zero_())
    assert sample(torch.tensor([0, 1.0, 0])) == 1
