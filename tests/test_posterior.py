"""The exact posterior is that of plain Bayes, one game at a time."""

import itertools
from typing import NamedTuple

from evaluation.posterior import Posterior
from evaluation.strangers import SwitchingSeats
from stag_hunt_env import StagHuntConfig, StagHuntEnv, redraw_prob, sample

import pytest
import reference_game as reference
import torch
from helpers import games_of


class Step(NamedTuple):
    games: list  # plain-Python games before the step, and so are:
    posterior: torch.Tensor
    expected: torch.Tensor  # what the posterior expects of everybody
    probs: torch.Tensor
    seen: tuple  # what everybody did, and who was there
    done: torch.Tensor


def play(env, seats, posterior, steps):
    """Learners play any action"""
    for _ in range(steps):
        games = games_of(env.state)
        learner_probs = torch.full((seats.num_learners, seats.num_envs, 7), 1 / 7)
        probs = seats.action_probs(env.state, learner_probs)
        before = posterior.probs()
        expected = posterior.action_probs(probs)
        actions = sample(probs)
        _, present, done = env.advance(actions)
        posterior.update(actions, present, done)
        seats.update(done)
        yield Step(games, before, expected, probs, (actions, present), done)


def slow_posterior(config, seen, population, forget, unsteady):
    """[(game before the step, seat, action, acted, done)] of one seat -> posteriors before each step. forget: how
    likely a game's end brings another player, where who sits there is steady, and where not"""
    shares = [1 - unsteady, unsteady]
    joint = [[share / len(population)] * len(population) for share in shares]  # steady or not, and who it is
    found = []
    for game, seat, action, acted, done in seen:
        found.append([steady + other for steady, other in zip(*joint, strict=True)])
        if acted:
            chances = [max(reference.player_probs(config, game, seat, name)[action], 1e-9) for name in population]
            joint = [[p * chance for p, chance in zip(row, chances, strict=True)] for row in joint]
            total = sum(map(sum, joint))
            joint = [[p / total for p in row] for row in joint]
        if done:
            rows = zip(joint, forget, strict=True)
            joint = [[(1 - f) * p + f * sum(row) / len(row) for p in row] for row, f in rows]
    return found


BAYES = [  # redraw, is it remembered over games, wall pieces, share of unsteady players
    ("game", True, 0, 0.0),
    ("game", False, 0, 0.0),
    ("never", True, 1, 0.25),
    (0.3, True, 0, 0.25),
    (0.3, False, 0, 0.0),
]


@pytest.mark.parametrize("redraw, remember, walls, unsteady", BAYES)
def test_posterior_is_that_of_plain_bayes(redraw, remember, walls, unsteady):
    config = StagHuntConfig(4, 5, num_players=3, num_stags=2, num_hares=2, final_time=6, max_wall_pieces=walls)
    population = ("nearest_hare", "random", "last_stag", "first_stag")
    tables = [["mixed", "learner", "nearest_hare"], ["mixed", "mixed", "noisy_stag"]]
    torch.manual_seed(1)
    env = StagHuntEnv(config, 8, seed=1)
    seats = SwitchingSeats(env, tables, unsteady=unsteady, population=population, redraw=redraw)
    steps = list(play(env, seats, Posterior(seats, remember, unsteady), 20))
    for b, i in itertools.product(range(8), range(3)):
        name = tables[b // 4][i]
        if name == "learner":
            torch.testing.assert_close(steps[-1].posterior[b, i], torch.full((4,), 0.25))
            assert all(torch.equal(step.expected[b, i], step.probs[b, i]) for step in steps)
            continue
        seen = [(step.games[b], i, *(x[b, i].item() for x in step.seen), bool(step.done[b])) for step in steps]
        forget = redraw_prob(redraw) if name == "mixed" else 0.0
        expected = slow_posterior(config, seen, population, (forget, 1.0) if remember else (1.0, 1.0), unsteady)
        for step, posterior in zip(steps, expected, strict=True):
            assert step.posterior[b, i].tolist() == pytest.approx(posterior, abs=1e-5)
            table = [reference.player_probs(config, step.games[b], i, player) for player in population]
            mixture = (torch.tensor(posterior)[:, None] * torch.tensor(table)).sum(0)
            torch.testing.assert_close(step.expected[b, i], mixture, atol=1e-5, rtol=0)
    assert sum(int(step.done.sum()) for step in steps) >= 24
