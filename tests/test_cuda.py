"""On a GPU the game is the same game: as on the CPU, in a CUDA graph, and compiled; and a step never waits for the host."""

import pytest
import torch
from helpers import mixed_actions, random_kinds, seeded

from stag_hunt_env import ALL_SEATS, PLAYER_PROBS, STRANGER_PROBS, StagHuntConfig, StagHuntEnv, State

pytestmark = pytest.mark.cuda

CONFIGS = [
    StagHuntConfig(final_time=6),
    StagHuntConfig(height=3, width=5, num_players=3, final_time=5, strengths=(1, 2, 3), time_reward=-0.125, permute_ids=True),
    StagHuntConfig(height=6, width=4, num_stags=2, max_wall_pieces=2, final_time=9, prosocial=True, steps_after_first_hunt=2),
]
GAMES, STEPS = 256, 25


def action_lists(config, seed=1):
    return torch.randint(7, (STEPS, GAMES, config.num_players), generator=seeded(seed)).cuda()


def snapshot(env, results):
    kept = (
        *results,
        *env.state,
        *env.final_state,
        env.final_return,
        env.final_length,
        env.episode_return,
        env.final_observation(),
    )
    return [x.clone() for x in kept]


def assert_equal(ours, expected):
    for x, y in zip(ours, expected, strict=True):
        if x.is_floating_point():
            torch.testing.assert_close(x, y, atol=1e-6, rtol=0)
        else:
            assert torch.equal(x, y)


def eager_history(config, seed=3):
    env = StagHuntEnv(config, GAMES, "cuda", seed=seed)
    return [snapshot(env, env.step(actions)) for actions in action_lists(config)]


@pytest.mark.parametrize("config", CONFIGS)
def test_step_never_waits_for_the_host(config):
    env, actions = StagHuntEnv(config, GAMES, "cuda"), action_lists(config)
    env.step(actions[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for acts in actions:
            env.step(acts)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("config", CONFIGS)
def test_replays_of_a_captured_step_equal_eager_steps(config):
    env = StagHuntEnv(config, GAMES, "cuda", seed=9)
    actions = action_lists(config)
    buffer = actions[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            env.step(buffer)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(env.generator)
    with torch.cuda.graph(graph):
        results = env.step(buffer)
    env.reset(seed=3)
    for acts, expected in zip(actions, eager_history(config), strict=True):
        buffer.copy_(acts)
        graph.replay()
        assert_equal(snapshot(env, results), expected)


@pytest.mark.parametrize("config", CONFIGS)
def test_compiled_steps_equal_eager_steps(config):
    env = StagHuntEnv(config, GAMES, "cuda", seed=3, compile=True)
    for acts, expected in zip(action_lists(config), eager_history(config), strict=True):
        assert_equal(snapshot(env, env.step(acts)), expected)


@pytest.mark.parametrize("config", CONFIGS)
def test_transition_is_that_of_the_cpu(config):
    cpu, gpu = StagHuntEnv(config, GAMES, seed=4), StagHuntEnv(config, GAMES, "cuda", seed=4)
    generator = seeded(5)
    state, kinds = cpu.initial_state(), random_kinds(cpu, generator)
    for _ in range(config.final_time + 1):
        there = State(*(x.cuda() for x in state))
        assert torch.equal(cpu.observe(state), gpu.observe(there).cpu())
        assert torch.equal(cpu.legal_actions(state), gpu.legal_actions(there).cpu())
        assert_equal([gpu.clock(there).cpu(), gpu.game_over(there).cpu()], [cpu.clock(state), cpu.game_over(state)])
        for probs in (*PLAYER_PROBS.values(), *STRANGER_PROBS.values()):
            assert_equal([probs(gpu, there, ALL_SEATS).cpu()], [probs(cpu, state, ALL_SEATS)])
        actions = mixed_actions(cpu, state, kinds, 0.2, generator)
        state, *results = cpu.transition(state, actions)
        after, *ours = gpu.transition(there, actions.cuda())
        assert_equal([x.cpu() for x in (*after, *ours)], [*state, *results])


@pytest.mark.parametrize("bad", [-1, 7, 100, -(2**31)])
def test_actions_out_of_range_act_as_stay(bad):
    env = StagHuntEnv(CONFIGS[1], GAMES, "cuda", seed=6)
    ours, stayed = ([*after, *results] for after, *results in (env.transition(env.state, _all(a)) for a in (bad, 4)))
    assert_equal(ours, stayed)


def _all(action):
    return torch.full((GAMES, 3), action, device="cuda")


@pytest.mark.parametrize("config", CONFIGS)
def test_same_seed_same_games(config):
    env = StagHuntEnv(config, GAMES, "cuda", seed=3)
    first = eager_history(config)
    for _ in range(2):
        env.reset(seed=3)
        torch.cuda.manual_seed(torch.initial_seed() + 1)  # the global generator does not matter
        for acts, expected in zip(action_lists(config), first, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(snapshot(env, env.step(acts)), expected, strict=True))
    env.reset()
    assert not torch.equal(env.step(action_lists(config)[0])[0], first[0][0])


def test_actions_on_the_wrong_device_are_refused():
    env = StagHuntEnv(CONFIGS[1], GAMES, "cuda")
    with pytest.raises(ValueError, match="cuda"):
        env.step(_all(4).cpu())
