"""Many games of StagHunt-v0 at once, through gymnasium.make_vec."""

import warnings

import stag_hunt_env
from stag_hunt_env import StagHuntGymEnv, State

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from helpers import stir_global_generator

GAMES = 12
FIELDS = [
    {},
    {"height": 5, "width": 3, "num_players": 3, "seats": "nearest_hare,learner,random", "max_wall_pieces": 1},
    {"num_stags": 2, "final_time": 3, "steps_after_first_hunt": 1},
]


def make(num_envs=GAMES, **fields):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return gymnasium.make_vec("stag_hunt_env:StagHunt-v0", num_envs=num_envs, **fields)


def one_of(nested, row):
    """The entry of one game in nested dicts of arrays"""
    return {name: one_of(x, row) if isinstance(x, dict) else x[row] for name, x in nested.items()}


def assert_equal(ours, expected):
    assert ours.keys() == expected.keys()
    for name, x in ours.items():
        assert np.array_equal(x, expected[name]) and x.dtype == expected[name].dtype, name


@pytest.mark.parametrize("fields", FIELDS)
def test_games_are_those_of_the_single_wrapper(fields, monkeypatch):
    """From the same boards, with the same actions of everybody. Random numbers come in another order."""
    env, singles, rng = make(**fields), [StagHuntGymEnv(**fields) for _ in range(GAMES)], np.random.default_rng(1)
    draw_actions, drawn = stag_hunt_env._joint_actions, {}

    def joint_actions(core, state, sits, chosen):
        if core is env.core:
            drawn["joint"] = draw_actions(core, state, sits, chosen)
            return drawn["joint"]
        assert drawn["joint"][drawn["row"], sits["learner"]] == chosen
        return drawn["joint"][drawn["row"]][None]

    def begin(single, row):
        single.reset()
        single.parallel_env.game = State(*(x[row : row + 1].clone() for x in env.core.state))

    monkeypatch.setattr(stag_hunt_env, "_joint_actions", joint_actions)
    observations, infos = env.reset(seed=3)
    for row, single in enumerate(singles):
        begin(single, row)
    ended = 0
    for _ in range(40):
        masks = infos["action_mask"]
        actions = np.array([rng.choice(np.flatnonzero(mask)) if rng.random() < 0.8 else 6 for mask in masks])
        observations, rewards, over, cut, infos = env.step(actions)
        assert env.observation_space.contains(observations) and not cut.any()
        assert infos["_action_mask"].all() and np.array_equal(infos["action_mask"], observations["action_mask"])
        assert ("final_obs" in infos) == ("final_info" in infos) == over.any()
        for row, single in enumerate(singles):
            drawn["row"] = row
            observation, reward, single_over, _, info = single.step(int(actions[row]))
            assert (rewards[row], over[row]) == (reward, single_over)
            if single_over:
                ended += 1
                assert infos["_final_obs"][row] and infos["_final_info"][row]
                assert_equal(infos["final_obs"][row], observation)
                assert np.array_equal(infos["final_info"]["action_mask"][row], info["action_mask"])
                begin(single, row)
                observation, _ = single.parallel_env._observe()
                observation = observation[single.agent]
                assert observation["time"] == 0
            assert_equal(one_of(observations, row), observation)
    assert ended > 15 and (env.core.state.time.unique().numel() > 1 or fields.get("final_time"))


def test_what_it_returns_is_what_gymnasium_makes_of_single_games():
    """Types, shapes and names, of a step in which games end"""
    ours = make(3, final_time=2)
    options = {"vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": AutoresetMode.SAME_STEP}}
    theirs = make(3, final_time=2, **options)
    assert ours.metadata["autoreset_mode"] == theirs.metadata["autoreset_mode"]
    assert ours.observation_space == theirs.observation_space and ours.action_space == theirs.action_space
    found = []
    for env in (ours, theirs):
        env.reset(seed=1)
        env.step(np.full(3, 4))
        observation, *others, infos = env.step(np.full(3, 4))
        arrays = [*observation.values(), *others, *infos["final_info"].values(), *infos["final_obs"][0].values()]
        arrays += [infos[name] for name in sorted(infos) if name != "final_info"]
        found.append((list(observation), sorted(infos), sorted(infos["final_info"]), [x.dtype for x in arrays]))
        assert infos["_final_obs"].all()
    assert found[0] == found[1]


def test_same_seed_same_games():
    def games(env, seed):
        env.reset(seed=seed)
        actions = np.random.default_rng(1).integers(7, size=(20, GAMES))
        return [(x[0]["observation"].tolist(), x[1].tolist()) for x in map(env.step, actions)]

    env = make()
    first = games(env, 5)
    before = stir_global_generator(2)
    assert games(make(), 5) == first == games(env, 5)
    assert torch.get_rng_state().tolist() == before
    assert games(env, 6) != first
    assert make().reset()[0]["observation"].tolist() != make().reset()[0]["observation"].tolist()


def test_what_is_refused_changes_nothing():
    env, twin = make(3), make(3)
    for each in (env, twin):
        each.reset(seed=1)
    for actions in ([4, 4, 1.9], [True] * 3, [4, 4, 7], [4, -1, 4], [4, 4]):
        with pytest.raises(ValueError, match="3 integers, 0 to 6"):
            env.step(np.array(actions))
    with pytest.raises(gymnasium.error.Error):
        env.reset(seed=-1)
    for _ in range(5):
        ours, expected = env.step([4, 4, 4]), twin.step([4, 4, 4])
        assert_equal(ours[0], expected[0])
    assert torch.equal(env.core.generator.get_state(), twin.core.generator.get_state())
