"""The PettingZoo and Gymnasium wrappers of one game."""

import warnings

from evaluation.strangers import STRANGER_PROBS
from stag_hunt_env import PLAYER_PROBS, POPULATION, StagHuntConfig, StagHuntGymEnv, StagHuntParallelEnv, sample

import gymnasium
import numpy as np
import pytest
import reference_game as reference
import torch
from gymnasium.utils.env_checker import check_env
from helpers import games_of, planes_of, same_tree, stir_global_generator
from pettingzoo.test import parallel_api_test, parallel_seed_test

CONFIGS = [
    StagHuntConfig(),
    StagHuntConfig(height=3, width=5, num_players=2, num_stags=2, num_hares=1, final_time=15),
    StagHuntConfig(height=6, width=4, num_players=8, max_wall_pieces=2, permute_ids=True, final_time=15),
    StagHuntConfig(height=2, width=4, num_players=3, steps_after_first_hunt=1),
]
SEATS = ("nearest_hare", "learner", "nearest_stag")


@pytest.mark.parametrize("config", CONFIGS)
def test_pettingzoo_checks(config, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(StagHuntParallelEnv(config), num_cycles=150)
        parallel_seed_test(lambda: StagHuntParallelEnv(config), num_cycles=40)


def test_gymnasium_checks():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mode in ("ansi", "rgb_array"):
            check_env(gymnasium.make("stag_hunt_env:StagHunt-v0", render_mode=mode).unwrapped)
    check_env(StagHuntGymEnv(CONFIGS[3], SEATS), skip_render_check=True)


def test_what_check_env_of_stable_baselines3_asks_for():
    """It takes a Box of three axes for an image, one of two for a mistake; all else must be castable to its space"""
    env = gymnasium.make("stag_hunt_env:StagHunt-v0", height=5)
    observation, _ = env.reset(seed=1)
    for name, space in env.observation_space.spaces.items():
        assert not isinstance(space, gymnasium.spaces.Box) or len(space.shape) == 1, name
        assert observation[name].shape == space.shape and np.can_cast(observation[name].dtype, space.dtype), name
    _, *others = env.step(np.array(4))  # as model.predict gives it
    assert [type(x) for x in others] == [float, bool, bool, dict]


def some_actions(env, name, rng):
    """{agent: action}, most of them those of a rule-based player, and some illegal"""
    legal = env.core.legal_actions(env.game)
    actions = {}
    for agent, i in env.seat.items():
        rule_based = sample(PLAYER_PROBS[name](env.core, env.game, legal))[0, i]
        actions[agent] = int(rule_based if rng.random() < 0.8 else rng.integers(7))
    return actions


def assert_seen(env, observations, infos, game):
    """What everyone sees is the plain-Python `game`"""
    config = env.config
    planes = planes_of(config, [game])[0].numpy()
    for agent, i in env.seat.items():
        observation = observations[agent]
        assert env.observation_space(agent).contains(observation)
        assert np.array_equal(observation["observation"], planes[i])
        assert observation["time"] == np.float32(game.time / config.final_time)
        mask = observation["action_mask"]
        assert set(np.flatnonzero(mask)) == reference.legal_actions(config, game, i)
        assert np.array_equal(infos[agent]["action_mask"], mask)
        assert infos[agent]["action_mask"].dtype == np.int8, "what Discrete.sample(mask) takes"


@pytest.mark.parametrize("config", CONFIGS)
def test_one_game_is_the_plain_game(config):
    """Each step of 6 games: rewards, ends, what everyone sees and the legal actions"""
    torch.manual_seed(1)
    env, rng, caught = StagHuntParallelEnv(config), np.random.default_rng(1), set()
    agents = [f"player_{i}" for i in range(config.num_players)]
    assert env.possible_agents == agents
    for number in range(6):
        observations, infos = env.reset(seed=None if number % 2 else number)
        (game,) = games_of(env.game)
        assert_seen(env, observations, infos, game)
        while env.agents:
            actions = some_actions(env, POPULATION[number % 3], rng)
            observations, rewards, ends, cuts, infos = env.step(actions)
            expected, _, over = reference.step(config, game, list(actions.values()))
            assert list(rewards.values()) == pytest.approx(expected)
            assert list(observations) == list(rewards) == list(ends) == list(cuts) == list(infos) == agents
            assert ends == dict.fromkeys(agents, over) and not any(cuts.values())
            assert env.agents == ([] if over else agents)
            assert_seen(env, observations, infos, game)
        caught |= {prey < config.num_stags for prey, alive in enumerate(game.alive) if not alive}
        with pytest.raises(ValueError, match="reset"):
            env.step(dict.fromkeys(agents, 4))
    assert caught == {True, False}, "stags and hares"


@pytest.mark.parametrize("learner", range(3))
def test_gym_learner_sits_in_its_seat_and_its_episode_ends_when_it_has_left(learner):
    config = StagHuntConfig(height=3, width=5, num_players=3, num_hares=3)
    seats = ["nearest_hare"] * 3
    seats[learner] = "learner"
    env, rng, left = StagHuntGymEnv(config, tuple(seats)), np.random.default_rng(4), 0
    parallel = env.parallel_env
    for seed in range(8):
        observation, info = env.reset(seed=seed)
        over = False
        while not over:
            (game,) = games_of(parallel.game)
            assert game.present[learner], "a step of somebody who has left"
            assert_seen(parallel, {env.agent: observation}, {env.agent: info}, game)
            masks = env.action_masks()
            assert masks.dtype == bool and np.array_equal(masks, observation["action_mask"])
            legal = np.flatnonzero(masks)
            action = int(legal[-1] if legal[-1] > 4 and seed % 2 else rng.choice(legal))
            observation, reward, over, truncated, info = env.step(action)
            move = {0: -5, 1: 5, 2: -1, 3: 1}.get(action, 0)
            assert parallel.game.position[0, learner] == game.position[learner] + move
            has_left = not parallel.game.present[0, learner]
            assert (reward > 0) == has_left and truncated is False
        left += has_left
        assert has_left or parallel.game.time == 35
        others = [i for i in range(3) if i != learner]
        assert parallel.game.time < 35 or not parallel.game.present[0, others].any(), "hunters of hares find one"
        with pytest.raises(ValueError, match="reset"):
            env.step(4)
    assert left > 2


def test_agents_may_share_a_game_with_rule_based_players():
    env = StagHuntParallelEnv(seats=("nearest_hare", "learner", "nearest_hare", "learner"), num_hares=3)
    observations, _ = env.reset(seed=1)
    assert list(observations) == env.agents == ["player_1", "player_3"]
    while env.agents:
        observations, rewards, *_ = env.step(dict.fromkeys(env.agents, 4))
        assert list(rewards) == ["player_1", "player_3"] and not any(rewards.values())
    assert env.game.present.tolist() == [[False, True, False, True]] and env.game.time == 35
    assert np.array_equal(observations["player_3"]["observation"], env.core.observe(env.game)[0, 3].numpy())


MIXED_SEATS = ("nearest_hare", "learner", "random", "learner", "first_stag")


def test_what_is_refused_changes_nothing():
    env, twin = (StagHuntParallelEnv(num_players=5, seats=MIXED_SEATS) for _ in range(2))
    right = {"player_1": 4, "player_3": 4}
    for each in (env, twin):
        each.reset(seed=3)
        each.step(right)
    for action in (7, -1, 1.9, True, "3"):
        with pytest.raises(ValueError):
            env.step({"player_1": 4, "player_3": action})
    with pytest.raises(KeyError):
        env.step({"player_1": 4})
    with pytest.raises((ValueError, OverflowError)):
        env.reset(-1)
    while env.agents:
        assert same_tree(env.step(right), twin.step(right))
    assert same_tree(env.reset(), twin.reset())
    for seats in ("learner,mixed,random,random,random", "learner,random,random", "learner,learner,random,random"):
        with pytest.raises(ValueError):
            StagHuntGymEnv(seats=seats)


def test_the_game_is_set_by_config_or_keywords():
    config = StagHuntConfig(height=5, width=3, num_players=2, num_hares=2)
    for way in ({"config": config}, vars(config), {"config": StagHuntConfig(2, 3, 2, num_hares=2), "height": 5}):
        assert StagHuntParallelEnv(**way).config == config
        env = gymnasium.make("stag_hunt_env:StagHunt-v0", seats="random,learner", **way)
        assert env.unwrapped.parallel_env.config == config
        assert env.reset(seed=1)[0]["observation"].shape == (5, 5, 3)


@pytest.mark.parametrize("others", [list(PLAYER_PROBS.keys() - STRANGER_PROBS.keys()), list(STRANGER_PROBS)])
def test_same_seed_same_whole_games(others):
    """Co-players of all kinds draw from the seed, too"""
    seats = ["learner", "learner", *others]
    config = StagHuntConfig(height=5, num_players=len(seats), num_stags=2, final_time=12)

    def games(env, seed):
        rng, history = np.random.default_rng(2), []
        for number in range(3):  # the later games go on from the seed
            history.append(env.reset(seed=None if number else seed))
            while env.agents:
                history.append(env.step({agent: int(rng.integers(5)) for agent in env.agents}))
        return history

    env = StagHuntParallelEnv(config, seats=seats)
    first = games(env, 5)
    before = stir_global_generator(2)
    assert same_tree(first, games(StagHuntParallelEnv(config, seats=seats), 5))
    assert torch.get_rng_state().tolist() == before
    assert not same_tree(first, games(env, 6))
    assert same_tree(first, games(env, 5)), "whatever was played before the seed"
    assert not same_tree(*(games(StagHuntParallelEnv(config, seats=seats), None) for _ in range(2)))
