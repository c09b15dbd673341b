"""The PettingZoo and Gymnasium wrappers, and the pictures."""

import random
import warnings

from stag_hunt_env import (
    PLAYER_PROBS,
    POPULATION,
    StagHuntConfig,
    StagHuntEnv,
    StagHuntGymEnv,
    StagHuntParallelEnv,
    State,
    UserError,
    render_ansi,
    render_rgb,
    write_gif,
)

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from helpers import global_generators, stir_global_generators
from pettingzoo.test import parallel_api_test, parallel_seed_test
from pettingzoo.test.state_test import test_state as check_state
from pettingzoo.test.state_test import test_state_space as check_state_space
from pettingzoo.utils.conversions import parallel_to_aec

CONFIGS = [
    StagHuntConfig(),
    StagHuntConfig(height=3, width=5, num_players=2, num_stags=2, num_hares=1, final_time=15),
    StagHuntConfig(height=6, width=4, num_players=8, max_wall_pieces=2, permute_ids=True),
    StagHuntConfig(height=2, width=4, num_players=3, steps_after_first_hunt=1),
    StagHuntConfig(height=5, width=3, num_players=3, num_stags=3, num_hares=1, hare_reward=2),
    StagHuntConfig(height=6, width=7, num_stags=2, num_hares=0, max_wall_pieces=4, steps_after_first_hunt=0),
    StagHuntConfig(height=3, width=3, num_players=3, num_stags=0, num_hares=2),
    StagHuntConfig(height=3, width=3, num_players=5, num_hares=1, steps_after_first_hunt=3),
]
SEATS = ("nearest_hare", "learner", "nearest_stag")


def parallel_game(env, rng, seed=None):
    """A whole game of random actions, most of them legal: [(observations, rewards, ends, truncations, infos)]"""
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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(StagHuntParallelEnv(config), num_cycles=150)
        parallel_seed_test(lambda: StagHuntParallelEnv(config), num_cycles=40)
        check_state_space(StagHuntParallelEnv(config))
        check_state(parallel_to_aec(StagHuntParallelEnv(config)), 20)


def test_gymnasium_checks():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mode in ("ansi", "rgb_array"):
            check_env(gymnasium.make("stag_hunt_env:StagHunt-v0", render_mode=mode).unwrapped)
    check_env(StagHuntGymEnv(CONFIGS[3], SEATS), skip_render_check=True)


def test_what_check_env_of_stable_baselines3_asks_for():
    """It takes a Box of three axes for an image, one of two for a mistake; all else must be castable to its space"""
    env = gymnasium.make("stag_hunt_env:StagHunt-v0", height=5)
    observation, info = env.reset(seed=1)
    for _ in range(3):
        for name, space in env.observation_space.spaces.items():
            assert not isinstance(space, gymnasium.spaces.Box) or len(space.shape) == 1, name
            assert observation[name].shape == space.shape and np.can_cast(observation[name].dtype, space.dtype), name
            assert space.contains(observation[name])
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert (type(reward), type(terminated), type(truncated), type(info)) == (float, bool, bool, dict)
        assert env.action_space.start == 0


def batch(states):
    return State(*(torch.cat(values) for values in zip(*states, strict=True)))


def some_actions(env, rng):
    """{agent: action}, most of them after prey, so that games get somewhere, and some illegal"""
    names = rng.choice(POPULATION, len(env.seats), p=(0.2, 0.4, 0.4))
    return {
        agent: env._choose(i, names[i]) if rng.random() < 0.8 else int(rng.integers(7)) for agent, i in env.seat.items()
    }


@pytest.mark.parametrize("config", CONFIGS)
def test_one_game_is_the_batched_game(config):
    """Each step of 16 games: rewards, ends, the state after it, what everyone sees and the legal actions."""
    env, core, rng, steps = StagHuntParallelEnv(config), StagHuntEnv(config), np.random.default_rng(1), []
    n, agents = config.num_players, [f"player_{i}" for i in range(config.num_players)]
    assert env.possible_agents == agents
    seen = []
    for game in range(16):
        observations, infos = env.reset(seed=None if game % 2 else game)
        while True:
            state = env._batch()
            seen.append((state, observations, infos, env.state()))
            if not env.agents:
                break
            actions = some_actions(env, rng)
            observations, rewards, ends, cuts, infos = env.step(actions)
            assert list(observations) == list(rewards) == list(ends) == list(cuts) == list(infos) == agents
            assert len(set(ends.values())) == 1 and not any(cuts.values())
            assert env.agents == ([] if ends["player_0"] else agents)
            steps.append((state, list(actions.values()), env._batch(), list(rewards.values()), ends["player_0"]))
        with pytest.raises(ValueError, match="reset"):
            env.step(dict.fromkeys(agents, 4))
    before, actions, after, rewards, ends = zip(*steps, strict=True)
    expected, reward, _, done = core.transition(batch(before), torch.tensor(actions))
    for ours, theirs in zip(batch(after), expected, strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    torch.testing.assert_close(torch.tensor(rewards), reward, rtol=0, atol=1e-5)
    assert torch.equal(torch.tensor(ends), done)
    caught = ~expected.prey_alive
    assert caught.any() and (caught[:, : config.num_stags].any() or not config.num_stags), "too tame a test"

    states = batch([state for state, *_ in seen])
    planes, legal, clock = core.observe(states).numpy(), core.legal_actions(states).numpy(), core.clock(states).numpy()
    for row, (_, observations, infos, whole) in enumerate(seen):
        for i, agent in enumerate(agents):
            one = observations[agent]
            assert env.observation_space(agent).contains(one)
            assert np.array_equal(one["observation"], planes[row, i])
            assert np.array_equal(one["action_mask"], legal[row, i])
            assert one["time"] == clock[row] and np.array_equal(infos[agent]["action_mask"], legal[row, i])
            assert infos[agent]["action_mask"].dtype == np.int8, "what Discrete.sample(mask) takes"
        assert env.state_space.contains(whole) and whole.shape == (n + 4, config.height, config.width)
        assert np.array_equal(whole[:-1], planes[row, 0]) and (whole[-1] == clock[row]).all()


@pytest.mark.parametrize("config", CONFIGS)
def test_rule_based_players_are_the_batched_ones(config):
    class Spy(random.Random):
        def choice(self, options):
            self.options = options
            return rng.choice(options)

    rng, core, found = np.random.default_rng(2), StagHuntEnv(config), {name: [] for name in POPULATION}
    env = StagHuntParallelEnv(config)
    for game in range(8):
        env.reset(seed=game)
        env.random = spy = Spy()
        while env.agents:
            for name, kept in found.items():
                i = int(rng.integers(config.num_players))
                assert env._choose(i, name) in spy.options
                kept.append((env._batch(), i, spy.options))
            env.step(some_actions(env, rng))
    for name, kept in found.items():
        states, seats, options = zip(*kept, strict=True)
        probs = PLAYER_PROBS[name](core, batch(states), slice(None))[range(len(seats)), seats]
        ours = torch.zeros_like(probs)
        for row, choices in enumerate(options):
            assert len(set(choices)) == len(choices)
            ours[row, choices] = 1 / len(choices)
        torch.testing.assert_close(ours, probs)


def test_gym_episode_ends_when_the_learner_has_left():
    env = StagHuntGymEnv(seats=(*SEATS, "random"))
    rng, left = np.random.default_rng(5), 0
    for game in range(60):
        observation, _ = env.reset(seed=game)
        ended = False
        while not ended:
            assert env.parallel_env.game.present[1], "a step of somebody who has left"
            legal = np.flatnonzero(observation["action_mask"])
            observation, _, ended, truncated, _ = env.step(legal[-1] if legal[-1] > 4 else rng.choice(legal))
            assert truncated is False
        left += not env.parallel_env.game.present[1]
        assert env.parallel_env.game.time == 35 or not env.parallel_env.game.present[1]
        with pytest.raises(ValueError, match="reset"):
            env.step(4)
    assert left > 20


def test_agents_may_share_a_game_with_rule_based_players():
    env = StagHuntParallelEnv(seats=("nearest_hare", "learner", "nearest_hare", "learner"), num_hares=3)
    observations, _ = env.reset(seed=1)
    assert list(observations) == env.agents == ["player_1", "player_3"]
    while env.agents:
        observations, rewards, *_ = env.step(dict.fromkeys(env.agents, 4))
        assert list(rewards) == ["player_1", "player_3"] and not any(rewards.values())
    assert env.game.present == [False, True, False, True] and env.game.time == 35
    assert np.array_equal(observations["player_3"]["observation"], env.core.observe(env._batch())[0, 3].numpy())


MIXED_SEATS = ("nearest_hare", "learner", "random", "learner", "first_stag")  # all that draw random numbers
REFUSED = [
    *(({"player_1": 4, "player_3": action}, 0) for action in (7, -1, 1.9, True, "3", None)),
    ({"player_1": 4}, 0),
    ({"player_0": 4, "player_1": 4, "player_3": 4}, 0),
    ([4, 4], 0),
    (None, -1),
    (None, 1.0),
    (None, True),
]


@pytest.mark.parametrize(("actions", "seed"), REFUSED)
def test_what_is_refused_changes_nothing(actions, seed):
    env, twin = (StagHuntParallelEnv(num_players=5, seats=MIXED_SEATS) for _ in range(2))
    right = {"player_1": 4, "player_3": 4}
    for each in (env, twin):
        each.reset(seed=3)
        each.step(right)
    with pytest.raises(UserError):
        env.reset(seed) if actions is None else env.step(actions)
    while env.agents:
        assert equal(env.step(right), twin.step(right))
    assert equal(env.reset(), twin.reset())


def test_the_game_is_set_by_config_or_keywords():
    config = StagHuntConfig(height=5, width=3, num_players=2, num_hares=2)
    for way in ({"config": config}, vars(config), {"config": vars(config)}, {"config": vars(config), "height": 5}):
        assert StagHuntParallelEnv(**way).config == config
        env = gymnasium.make("StagHunt-v0", seats="random,learner", **way)
        assert env.unwrapped.parallel_env.config == config
        assert env.reset(seed=1)[0]["observation"].shape == (5, 5, 3)


@pytest.mark.parametrize(
    "make, play", [(StagHuntParallelEnv, parallel_game), (lambda c: StagHuntGymEnv(c, SEATS), gym_game)]
)
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
    config = StagHuntConfig(height=3, width=5, num_players=3, num_stags=1, num_hares=3)
    seats = ["nearest_hare"] * 3
    seats[learner] = "learner"
    env, rng = StagHuntGymEnv(config, tuple(seats)), np.random.default_rng(4)
    parallel, core = env.parallel_env, env.parallel_env.core
    for seed in range(6):
        observation, _ = env.reset(seed=seed)
        terminated = False
        while not terminated:
            state = parallel._batch()
            assert env.observation_space.contains(observation)
            assert np.array_equal(observation["observation"], core.observe(state)[0, learner].numpy())
            assert np.array_equal(observation["action_mask"], core.legal_actions(state)[0, learner].numpy())
            masks = env.action_masks()
            assert masks.dtype == bool and np.array_equal(masks, observation["action_mask"])
            action = int(rng.choice(np.flatnonzero(observation["action_mask"])))
            observation, reward, terminated, truncated, _ = env.step(action)
            move = {0: -5, 1: 5, 2: -1, 3: 1}.get(action, 0)
            assert parallel.game.position[learner] == int(state.position[0, learner]) + move
            assert reward == 0 or (reward > 0 and not parallel.game.present[learner])
            assert truncated is False
        assert env.observation_space.contains(observation)
        assert parallel.game.time == 35 or not parallel.game.present[learner]
        others = [parallel.game.present[i] for i in range(3) if i != learner]
        assert parallel.game.time < 35 or not any(others), "hunters of hares always find one"


def test_ansi_shows_everyone_and_all_prey():
    config = StagHuntConfig(height=5, width=6, num_players=8, num_stags=2, num_hares=3, max_wall_pieces=1)
    env, walls = StagHuntEnv(config, 20, seed=6), False
    state = env.initial_state()
    crowd = state.position.clone()
    crowd[0] = crowd[0, 0]
    state = state._replace(position=crowd, present=torch.rand(20, 8, generator=env.generator) < 0.8)
    state = state._replace(prey_alive=torch.rand(20, 5, generator=env.generator) < 0.6)
    for game in range(20):
        *rows, below = render_ansi(config, State(*(x[game:] for x in state))).splitlines()
        board = "\n".join(rows)
        assert below.startswith("t=0/35") and len({len(row) for row in rows}) == 1, "a crooked frame"
        assert [board.count(str(i)) for i in range(8)] == state.present[game].int().tolist()
        assert (
            board.count("S") == state.prey_alive[game, :2].sum()
            and board.count("h") == state.prey_alive[game, 2:].sum()
        )
        for i in state.present[game].nonzero().flatten().tolist():
            row, column = divmod(int(state.position[game, i]), 6)
            assert str(i) in rows[row].strip("|").split("|")[column]
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
    assert not np.array_equal(picture, render_rgb(config, State(*(x[1:] for x in state))))


@pytest.mark.parametrize("mode", ["ansi", "rgb_array", None])
def test_wrappers_render(mode):
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
        parallel = getattr(env, "parallel_env", env)
        starts.append(parallel.game.position + parallel.game.prey_position)
    assert starts[0] != starts[1] or starts[1] != starts[2]


def test_a_player_may_be_added(monkeypatch):
    def statue(env, state, seat):
        return torch.eye(7)[4].expand(len(state.position), 7)

    monkeypatch.setitem(PLAYER_PROBS, "statue", statue)
    env = StagHuntGymEnv(seats=("learner", "statue", "statue", "statue"))
    env.reset(seed=1)
    before = list(env.parallel_env.game.position)
    env.step(4)
    assert env.parallel_env.game.position == before


@pytest.mark.parametrize("learner", [1, 2])
def test_masks_are_those_of_the_learners_seat(learner):
    seats = ["learner" if seat == learner else "random" for seat in range(3)]
    env = StagHuntGymEnv(height=3, width=3, num_players=3, num_hares=2, seats=seats)
    seen = set()
    for seed in range(4):
        (observation, _), over = env.reset(seed=seed), False
        while not over:
            mask = env.action_masks()
            assert mask.tolist() == observation["action_mask"].astype(bool).tolist()
            seen.add(tuple(mask))
            observation, _, over, _, _ = env.step(int(np.flatnonzero(mask)[0]))
    assert len(seen) > 3
