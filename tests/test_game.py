"""The batched game is exactly the plain-Python game of reference_game.py, step by step and with automatic reset."""

import dataclasses

from stag_hunt_env import StagHuntConfig as Config
from stag_hunt_env import StagHuntEnv, State, planes

import numpy as np
import pytest
import reference_game as reference
import torch
from helpers import (
    assert_same,
    assert_same_state,
    chi_square_p,
    games_of,
    legal_of,
    mixed_actions,
    planes_of,
    random_kinds,
    seeded,
    state_of,
    stir_global_generator,
)

CONFIGS = {
    "4h1s": Config(),
    "4h2s": Config(num_stags=2, final_time=12),
    "8x8": Config(height=8, width=8, num_stags=2),
    "tall": Config(height=7, width=3, num_players=3, num_stags=3, num_hares=2),
    "wide": Config(height=3, width=7, num_players=5, num_stags=2, num_hares=3, final_time=20),
    "one row": Config(height=1, width=9, num_players=3, num_stags=2, num_hares=2),
    "one column": Config(height=8, width=1, num_players=2, num_stags=1, num_hares=2),
    "8 players": Config(5, 6, num_players=8, num_stags=3, num_hares=3),
    "8 on a stag": Config(height=3, width=3, num_players=8, num_hares=0),
    "2 players": Config(height=4, width=5, num_players=2, num_stags=1, num_hares=3),
    "no stags": Config(num_stags=0),
    "no prey": Config(height=2, width=3, num_players=3, num_stags=0, num_hares=0, final_time=5),
    "full board": Config(height=2, width=4, num_players=4, num_stags=1, num_hares=3),
    "crowded": Config(2, 3, num_players=4, num_stags=1, num_hares=1),
    "other values": Config(stag_reward=7, hare_reward=-3, num_players=6, height=5),
    "end at first hunt": Config(steps_after_first_hunt=0),
    "end after first hunt": Config(5, num_players=6, steps_after_first_hunt=3),
    "early end": Config(steps_after_first_hunt=3, final_time=6),
    "permuted": Config(height=3, width=4, permute_ids=True),
    "one step": Config(height=2, width=5, final_time=1),
    "walls": Config(height=6, width=7, max_wall_pieces=3, final_time=18),
    "walls, 8 divides": Config(height=4, width=6, num_players=3, num_stags=2, num_hares=2, max_wall_pieces=2),
    "walls, little room": Config(height=3, width=5, num_stags=2, max_wall_pieces=4, permute_ids=True),
}
GAMES = 48


def play_step(config, games, actions):
    """Steps every plain-Python game -> reward, who acted, done, as tensors"""
    results = [reference.step(config, game, acts) for game, acts in zip(games, actions.tolist(), strict=True)]
    reward, acted, done = zip(*results, strict=True)
    return torch.from_numpy(np.array(reward, np.float32)), torch.tensor(acted), torch.tensor(done)


def assert_same_step(ours, expected):
    for name, mine, theirs in zip(("reward", "present_before", "done"), ours, expected, strict=True):
        assert_same(name, mine, theirs)


def cells_of(config, games):
    """uint8 [B, N, N + P]: the cell of each player, from each one's own on, then of each prey; H*W: not there"""
    gone, players = config.num_cells, config.num_players
    found = []
    for game in games:
        standing = [cell if there else gone for cell, there in zip(game.position, game.present, strict=True)]
        prey = [cell if alive else gone for cell, alive in zip(game.prey, game.alive, strict=True)]
        found.append([[standing[(i + k) % players] for k in range(players)] + prey for i in range(players)])
    return torch.tensor(found, dtype=torch.uint8)


def assert_same_view(env, state, games):
    config = env.config
    assert_same_state(state, state_of(config, games))
    observation = planes_of(config, games)
    assert_same("observe", env.observe(state), observation)
    cells = env.cells(state)
    assert_same("cells", cells, cells_of(config, games))
    walls = state.walls[:, None, : config.num_wall_cells].expand(-1, config.num_players, -1)
    assert_same("planes", planes(config, cells, walls), observation)
    assert_same("legal_actions", env.legal_actions(state), legal_of(env.config, games))
    assert env.game_over(state).tolist() == [reference.game_over(env.config, game) for game in games]
    assert_same("clock", env.clock(state), state.time.float() / env.config.final_time)


@pytest.mark.parametrize("name", CONFIGS)
def test_transition_is_the_plain_game(name):
    config, paid = CONFIGS[name], set()
    env, generator, played = StagHuntEnv(config, GAMES, seed=1), seeded(2), 0
    while played < 400:
        state, kinds = env.initial_state(), random_kinds(env, generator)
        games = games_of(state)
        assert_same_view(env, state, games)
        for _ in range(config.final_time + 2):
            played += sum(not reference.game_over(config, game) for game in games)
            actions = mixed_actions(env, state, kinds, 0.2, generator)
            before = State(*(x.clone() for x in state))
            after, *results = env.transition(state, actions)
            assert_same_state(state, before)  # a pure function leaves its input alone
            assert_same_step(results, play_step(config, games, actions))
            assert_same_view(env, after, games)
            state = after
            paid |= set(results[0].unique().tolist())
            if not results[1].any():  # nobody acted: every game had ended before
                break
    catches = [config.stag_reward / 2] * (config.num_stags > 0) + [config.hare_reward] * (config.num_hares > 0)
    assert {0, *catches} <= paid or config.final_time == 1


@pytest.mark.parametrize("name", ["4h1s", "tall", "8 players", "end after first hunt", "walls, 8 divides"])
def test_transition_from_any_state(name):
    """Search and imagination start from states that play does not reach: who left stands on living prey, say."""
    config, generator = CONFIGS[name], seeded(20)
    env = StagHuntEnv(config, 300, seed=21)
    deal = env.initial_state()

    def chance(share, like):
        return torch.rand(like.shape, generator=generator) < share

    on_prey = deal.prey_position.gather(1, torch.randint(config.num_prey, deal.position.shape, generator=generator))
    on_prey = torch.where(torch.arange(300)[:, None] % 2 == 0, deal.prey_position[:, :1], on_prey)  # or all on one
    time = torch.randint(config.final_time + 1, (300,), generator=generator, dtype=torch.int32)
    state = deal._replace(
        position=torch.where(chance(0.7, on_prey), on_prey, deal.position),
        present=chance(0.8, deal.present),
        prey_alive=chance(0.8, deal.prey_alive),
        time=time,
        first_hunt=torch.where(chance(0.5, time), -1, time - 1).to(torch.int32),
    )
    games = games_of(state)
    assert_same_view(env, state, games)
    hunts = torch.randint(5, 7, deal.position.shape, generator=generator)
    actions = torch.where(chance(0.8, hunts), hunts, torch.randint(7, hunts.shape, generator=generator))
    after, *results = env.transition(state, actions)
    assert_same_step(results, play_step(config, games, actions))
    assert_same_view(env, after, games)
    assert {config.stag_reward / 2, np.float32(config.stag_reward / 3)} <= set(results[0].unique().tolist())


def test_a_worked_example():
    """Player 0 stands at the stag, on cell 1 of four, and hunts in vain until player 1 has walked past the hare."""
    env = StagHuntEnv(Config(height=1, width=4, num_players=2, num_hares=1), num_envs=1)
    cells = torch.tensor([[1, 3], [1, 2], [0, -1]], dtype=torch.int32)
    yes, no_walls = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.uint8)
    state, found = State(cells[:1], yes, cells[1:2], yes, no_walls, cells[2, :1], cells[2, 1:]), []
    for actions in ([5, 2], [5, 2], [5, 5]):  # hunt and walk, hunt and walk, hunt together
        state, reward, _, done = env.transition(state, torch.tensor([actions]))
        found.append((state.position[0].tolist(), reward[0].tolist(), done.tolist()))
    assert found == [([1, 2], [0, 0], [False]), ([1, 1], [0, 0], [False]), ([1, 1], [5, 5], [True])]


def test_payoffs_say_what_paid_them():
    """Of equal payoffs, the one that comes with less: nothing before a hare before a stag"""
    two = {"num_players": 2, "num_hares": 1}
    assert Config(**two).payoffs() == {0.0: "none", 0.5: "hare", 1.0: "hare", 5.0: "stag"}
    assert Config(**two, hare_reward=5.0).payoffs() == {0.0: "none", 2.5: "hare", 5.0: "hare"}
    assert Config(**two, hare_reward=0.0, stag_reward=4.0).payoffs() == {0.0: "none", 2.0: "stag"}


@pytest.mark.parametrize("name", ["4h1s", "tall", "crowded", "walls, little room", "one step", "end at first hunt"])
def test_step_with_automatic_reset(name):
    config = CONFIGS[name]
    env, generator = StagHuntEnv(config, 24, seed=3), seeded(4)
    games = games_of(env.state)
    returns, final_return = torch.zeros(2, 24, config.num_players)
    final_state, final_planes = state_of(config, games), planes_of(config, games)
    episodes = 0
    prey, final_prey = torch.zeros(2, 24, config.num_players, dtype=torch.int64)
    kinds = random_kinds(env, generator)
    for _ in range(2 * config.final_time):
        actions = mixed_actions(env, env.state, kinds, 0.2, generator)
        observation, *results = env.step(actions)
        reward, acted, done = play_step(config, games, actions)
        assert_same_step(results, (reward, acted, done))
        assert acted.any(1).all(), "a finished game was played on"
        episodes += int(done.sum())

        ended, last, last_planes = done[:, None], state_of(config, games), planes_of(config, games)
        returns += reward
        final_return, returns = torch.where(ended, returns, final_return), torch.where(ended, 0.0, returns)
        prey = torch.where(acted & ~last.present, actions, prey)  # what a player hunted in the step in which it left
        final_prey, prey = torch.where(ended, prey, final_prey), torch.where(ended, 0, prey)
        final_planes = torch.where(ended[..., None, None, None], last_planes, final_planes)
        final_state = State(
            *(torch.where(done if x.dim() == 1 else ended, x, y) for x, y in zip(last, final_state, strict=True))
        )
        assert_same_state(env.final_state, final_state)
        assert_same("observe(final_state)", env.observe(env.final_state), final_planes)
        assert_same("final_return", env.final_return, final_return)
        assert_same("episode_return", env.episode_return, returns)
        assert_same("final_prey", env.final_prey, final_prey)

        for b, new in enumerate(games_of(env.state)):
            if done[b]:
                assert new.time == 0 and new.first_hunt == -1 and all(new.present) and all(new.alive)
                occupied = [*new.position, *new.prey, *new.walls]
                assert len({*occupied}) == len(occupied)
                games[b] = new
        assert_same_view(env, env.state, games)
        assert_same("observation", observation, planes_of(config, games))
    assert episodes >= 2 * 24, f"only {episodes} games ended"


@pytest.mark.parametrize("final_time", [1, 2, 3, 35])
def test_games_after_automatic_reset_are_fresh_deals(final_time):
    """Also where some games end earlier than others"""
    config = Config(height=3, width=5, num_players=3, num_stags=1, num_hares=2, final_time=final_time)
    env, generator = StagHuntEnv(config, 64, seed=5), seeded(6)
    kinds = torch.full((64, 3), 2)
    counts, rounds = torch.zeros(6, 15), max(60, 2 * final_time)
    first = torch.cat([env.state.position, env.state.prey_position], 1)
    deals, started = {tuple(row) for row in first.tolist()}, len(first)
    for _ in range(rounds):
        *_, done = env.step(mixed_actions(env, env.state, kinds, 0.2, generator))
        cells = torch.cat([env.state.position, env.state.prey_position], 1)[done]
        for column in range(6):
            counts[column] += torch.bincount(cells[:, column], minlength=15)
        deals |= {tuple(row) for row in cells.tolist()}
        started += len(cells)
    assert started >= (rounds // final_time + 1) * 64
    # 15 * 14 * ... * 10 = 3.6 million deals: repeats are rare unless a deal is played twice.
    assert len(deals) >= 0.995 * started
    if started > 1000:
        assert min(chi_square_p(row) for row in counts) > 1e-3


def test_same_seed_same_games():
    config = dataclasses.replace(CONFIGS["walls, 8 divides"], final_time=6)

    def run(env, start):
        generator, history = seeded(8), [start]
        for _ in range(15):
            history.extend(x.clone() for x in env.step(torch.randint(7, (16, 3), generator=generator)))
        return [*history, *(x.clone() for x in (*env.state, *env.final_state, env.final_return))]

    def equal(a, b):
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    env = StagHuntEnv(config, 16, seed=9)
    first = run(env, env.observe(env.state))
    assert equal(first, run(env, env.reset(seed=9)))  # also the deals prepared for automatic reset
    assert not equal(first, run(env, env.reset()))
    other = StagHuntEnv(config, 16, seed=10)
    assert not equal(first, run(other, other.observe(other.state)))
    fresh = StagHuntEnv(config, 16, seed=9)
    before = stir_global_generator(11)
    assert equal(first, run(fresh, fresh.observe(fresh.state)))
    assert torch.get_rng_state().tolist() == before


def test_a_board_of_more_cells_than_a_byte_counts():
    env = StagHuntEnv(Config(height=15, width=20), 8, seed=1)
    state = env.initial_state()
    state = state._replace(present=state.present & (torch.arange(4) != 2))
    assert torch.equal(env.observe(state), planes_of(env.config, games_of(state)))
    assert env.cells(state).max() == 300


def test_what_is_wrong_is_refused_and_changes_nothing():
    env = StagHuntEnv(num_envs=2)
    for shape, action in (((2, 4), 1.9), ((2, 4), True), ((2, 4), 7), ((2, 4), -1), ((2, 3), 4)):
        with pytest.raises(ValueError, match=r"0 to 6, \[2, 4\]"):
            env.step(torch.full(shape, action))
    assert (env.state.time == 0).all()
    least = {"num_players": 2, "height": 1, "width": 1, "final_time": 1}
    least |= {"num_stags": 0, "num_hares": 0, "max_wall_pieces": 0}
    for name, value in least.items():
        with pytest.raises(ValueError, match=name):
            Config(**{name: value - 1})
    with pytest.raises(ValueError, match="num_players"):
        Config(num_players=9)
    with pytest.raises(ValueError, match="9 players and prey, 6 cells"):
        Config(height=2, width=3)
