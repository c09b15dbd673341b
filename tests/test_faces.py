"""The PettingZoo and Gymnasium faces, and the pictures."""

import re

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from helpers import global_generators, stir_global_generators
from pettingzoo.test import parallel_api_test, parallel_seed_test

from stag_hunt_env import (
    PLAYER_PROBS,
    StagHuntConfig,
    StagHuntEnv,
    StagHuntGymEnv,
    StagHuntParallelEnv,
    render_ansi,
    render_rgb,
    write_gif,
)

CONFIGS = [
    StagHuntConfig(),
    StagHuntConfig(height=3, width=5, num_players=2, num_stags=2, num_hares=1, final_time=8, time_reward=-0.125),
    StagHuntConfig(height=6, width=4, num_players=8, max_wall_pieces=2, permute_ids=True, prosocial=True),
    StagHuntConfig(height=2, width=4, num_players=3, steps_after_first_hunt=1),
]
SEATS = ("nearest_hare", "learner", "nearest_stag")


def parallel_game(env, rng, seed=None):
    """A whole game of random actions, most of them legal: [(observations, rewards, terminations, truncations, infos)]"""
    observations, infos = env.reset(seed=seed)
    history = [(observations, {}, {}, {}, infos)]
    while env.agents:
        masks = {agent: observations[agent]["action_mask"] for agent in env.agents}
        wild = rng.random() < 0.2
        actions = {agent: int(rng.choice(7 if wild else np.flatnonzero(mask))) for agent, mask in masks.items()}
        history.append(env.step(actions))
        observations = history[-1][0]
    return history


def gym_game(env, rng, seed=None):
    history = [(*env.reset(seed=seed), 0.0, False, False)]
    while not history[-1][3]:
        observation, reward, terminated, truncated, info = env.step(int(rng.choice(7)))
        history.append((observation, info, reward, terminated, truncated))
    return history


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return np.array_equal(a, b)


@pytest.mark.parametrize("config", CONFIGS)
def test_pettingzoo_checks(config, capsys):
    parallel_api_test(StagHuntParallelEnv(config), num_cycles=300)
    parallel_seed_test(lambda: StagHuntParallelEnv(config), num_cycles=60)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gymnasium_checks():
    check_env(gymnasium.make("StagHunt-v0").unwrapped, skip_render_check=True)
    for mode in ("ansi", "rgb_array"):
        check_env(gymnasium.make("StagHunt-v0", render_mode=mode).unwrapped)
    check_env(StagHuntGymEnv(CONFIGS[3], SEATS), skip_render_check=True)


@pytest.mark.parametrize("config", CONFIGS)
def test_parallel_observations_lie_in_their_space_to_the_end(config):
    env, rng, lengths = StagHuntParallelEnv(config), np.random.default_rng(1), set()
    assert env.possible_agents == [f"player_{i}" for i in range(config.num_players)]
    core = StagHuntEnv(config)
    for game in range(8):
        observations, _ = env.reset(seed=game)
        state, total = env._game.state, 0.0
        while True:
            expected, legal = core.observe(state)[0].numpy(), core.legal_actions(state)[0].numpy()
            for i, agent in enumerate(env.possible_agents):
                assert env.observation_space(agent).contains(observations[agent])
                assert np.array_equal(observations[agent]["observation"], expected[i])
                assert np.array_equal(observations[agent]["action_mask"].astype(bool), legal[i])
                assert observations[agent]["time"] == np.float32(int(state.time) / config.final_time)
            if not env.agents:
                break
            actions = torch.from_numpy(rng.integers(0, 7, (1, config.num_players)))
            for i in range(config.num_players):
                if rng.random() < 0.8:
                    actions[0, i] = int(rng.choice(np.flatnonzero(legal[i])))
            observations, rewards, terminations, truncations, infos = env.step(
                dict(zip(env.agents, actions[0].tolist(), strict=True))
            )
            state, reward, _, done = core.transition(state, actions)
            total += reward
            assert list(rewards.values()) == reward[0].tolist()
            assert set(terminations.values()) == {bool(done)} and set(truncations.values()) == {False}
            assert env.agents == ([] if done else env.possible_agents)
            assert set(infos) == set(env.possible_agents)
        lengths.add(int(state.time))
        with pytest.raises(ValueError, match="reset"):
            env.step(dict.fromkeys(env.possible_agents, 4))
    assert len(lengths) > 1 or config.final_time in lengths


@pytest.mark.parametrize("make, play", [(StagHuntParallelEnv, parallel_game), (lambda c: StagHuntGymEnv(c, SEATS), gym_game)])
def test_same_seed_same_whole_games(make, play):
    config = CONFIGS[3]

    def games(seed):
        env, rng = make(config), np.random.default_rng(2)
        return [play(env, rng, seed), play(env, rng), play(env, rng)]  # the later games go on from the seed

    first = games(5)
    before = stir_global_generators(2)
    assert equal(first, games(5))
    assert global_generators() == before
    assert not equal(first, games(6))
    assert not equal(first[0][0], first[1][0]) or not equal(first[1][0], first[2][0])
    used = make(config)
    play(used, np.random.default_rng(3))
    assert equal(first[0], play(used, np.random.default_rng(2), 5))  # whatever was played before the seed


@pytest.mark.parametrize("learner", range(3))
def test_gym_learner_sits_in_its_seat(learner):
    config = StagHuntConfig(height=3, width=5, num_players=3, num_stags=1, num_hares=3, time_reward=-0.125)
    seats = ["nearest_hare"] * 3
    seats[learner] = "learner"
    env = StagHuntGymEnv(config, tuple(seats))
    rng, ends = np.random.default_rng(4), set()
    for game in range(6):
        observation, _ = env.reset(seed=game)
        terminated = False
        while not terminated:
            state = env._game.state
            assert env.observation_space.contains(observation)
            assert np.array_equal(observation["observation"], env._game.core.observe(state)[0, learner].numpy())
            assert np.array_equal(observation["action_mask"], env._game.core.legal_actions(state)[0, learner].numpy())
            action = int(rng.choice(np.flatnonzero(observation["action_mask"])))
            observation, reward, terminated, truncated, _ = env.step(action)
            after = env._game.state
            move = {0: -5, 1: 5, 2: -1, 3: 1}.get(action, 0)
            assert int(after.position[0, learner]) == int(state.position[0, learner]) + move
            base = -0.125 if state.present[0, learner] else 0.0
            assert reward == base or (reward > 0 and not after.present[0, learner])
            assert truncated is False
        assert env.observation_space.contains(observation)
        ends.add(int(env._game.state.present.sum()))
        others = [i for i in range(3) if i != learner]
        assert not env._game.state.present[0, others].any(), "hunters of hares always find one"


def test_ansi_shows_everyone_and_all_prey():
    config = StagHuntConfig(height=5, width=6, num_players=8, num_stags=2, num_hares=3, max_wall_pieces=1)
    env, walls = StagHuntEnv(config, 20, seed=6), False
    state = env.initial_state()
    crowd = state.position.clone()
    crowd[0] = crowd[0, 0]
    state = state._replace(position=crowd, present=torch.rand(20, 8, generator=env.generator) < 0.8)
    state = state._replace(prey_alive=torch.rand(20, 5, generator=env.generator) < 0.6)
    for game in range(20):
        text = re.sub(r"\033\[[0-9;]*m", "", render_ansi(config, state, None, game))
        board = text[: text.rindex("╯")]
        lines = board.splitlines()
        assert len({len(line) for line in lines[:-1]}) == 1, "a crooked frame"
        assert [board.count(str(i)) for i in range(8)] == state.present[game].int().tolist()
        assert board.count("S") == state.prey_alive[game, :2].sum() and board.count("h") == state.prey_alive[game, 2:].sum()
        rows = [line for line in lines if line.startswith("│")]
        for i in state.present[game].nonzero().flatten().tolist():
            row, column = divmod(int(state.position[game, i]), 6)
            assert str(i) in rows[row].strip("│").split("│")[column]
        walls |= bool(state.walls[game].any())
    assert walls


def test_pictures_show_what_changed():
    config = StagHuntConfig(height=4, width=6, num_stags=1, max_wall_pieces=1)
    env = StagHuntEnv(config, 4, seed=7)
    state = env.initial_state()
    picture = render_rgb(config, state)
    assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3
    cell = picture.shape[1] // 6
    legal = env.legal_actions(state)
    moved, *_ = env.transition(state, torch.where(legal[..., :4].any(-1), legal.int().argmax(-1), 4))
    changes = {
        "a move": moved._replace(time=state.time),
        "a player that left": state._replace(present=state.present & (torch.arange(4) != 2)),
        "a caught stag": state._replace(prey_alive=state.prey_alive & (torch.arange(5) != 0)),
        "a caught hare": state._replace(prey_alive=state.prey_alive & (torch.arange(5) != 4)),
        "walls": state._replace(walls=1 - state.walls),
    }
    for what, other in changes.items():
        board, before = render_rgb(config, other)[: 4 * cell], picture[: 4 * cell]
        assert not np.array_equal(board, before), f"{what} cannot be seen"
    assert not np.array_equal(picture, render_rgb(config, state._replace(time=state.time + 20)))
    assert not np.array_equal(picture, render_rgb(config, state, torch.ones(4, 4)))
    assert np.array_equal(picture, render_rgb(config, state, game=0))
    assert not np.array_equal(picture, render_rgb(config, state, game=1))


@pytest.mark.parametrize("mode", ["ansi", "rgb_array", None])
def test_faces_render(mode):
    for env in (StagHuntParallelEnv(render_mode=mode), gymnasium.make("StagHunt-v0", render_mode=mode).unwrapped):
        env.reset(seed=1)
        shown = env.render()
        assert type(shown) is {"ansi": str, "rgb_array": np.ndarray, None: type(None)}[mode]


def test_gif_can_be_read_back(tmp_path):
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(8)
    frames = [np.full((30, 40, 3), rng.integers(0, 255, 3), np.uint8) for _ in range(5)]
    write_gif(str(tmp_path / "a.gif"), frames)
    with image.open(tmp_path / "a.gif") as gif:
        assert gif.n_frames == 5 and gif.size == (40, 30)


@pytest.mark.parametrize("make", [StagHuntParallelEnv, StagHuntGymEnv])
def test_games_differ_from_one_environment_to_the_next(make):
    starts = []
    for _ in range(3):
        env = make()
        env.reset()
        starts.append(env._game.state.position.tolist() + env._game.state.prey_position.tolist())
    assert starts[0] != starts[1] or starts[1] != starts[2]


def test_a_player_may_be_added(monkeypatch):
    def statue(env, state, seat):
        return torch.eye(7)[4].expand(len(state.position), 7)

    monkeypatch.setitem(PLAYER_PROBS, "statue", statue)
    env = StagHuntGymEnv(seats=("learner", "statue", "statue", "statue"))
    env.reset(seed=1)
    before = env._game.state.position.clone()
    env.step(4)
    assert torch.equal(env._game.state.position, before)
