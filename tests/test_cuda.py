"""On a GPU: the same game as on the CPU, captured and compiled too; the same training; no step waits for the host."""

from pathlib import Path

import hopplus_ppo as hop
from evaluation import adapt
from stag_hunt_env import (
    ALL_SEATS,
    PLAYER_PROBS,
    STRANGER_PROBS,
    Run,
    Seats,
    StagHuntConfig,
    StagHuntEnv,
    State,
    planes,
    sample,
)

import pytest
import torch
from helpers import TINY_FLAGS, lines_of, mixed_actions, random_kinds, same_tree, seeded, without_times

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def nothing_stays_fused():
    yield
    hop.fuse(False)


CONFIGS = [
    StagHuntConfig(final_time=6),
    StagHuntConfig(height=3, width=5, num_players=3, final_time=5, permute_ids=True),
    StagHuntConfig(height=6, width=4, num_stags=2, max_wall_pieces=2, final_time=9, steps_after_first_hunt=2),
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
        cells = gpu.cells(there)
        assert torch.equal(cpu.cells(state), cells.cpu())
        walls = there.walls[:, None, : config.num_wall_cells].expand(-1, config.num_players, -1)
        assert torch.equal(planes(config, cells, walls), gpu.observe(there))
        assert torch.equal(cpu.legal_actions(state), gpu.legal_actions(there).cpu())
        assert_equal([gpu.clock(there).cpu(), gpu.game_over(there).cpu()], [cpu.clock(state), cpu.game_over(state)])
        for probs in (*PLAYER_PROBS.values(), *STRANGER_PROBS.values()):
            assert_equal([probs(gpu, there, ALL_SEATS).cpu()], [probs(cpu, state, ALL_SEATS)])
        actions = mixed_actions(cpu, state, kinds, 0.2, generator)
        state, *results = cpu.transition(state, actions)
        after, *ours = gpu.transition(there, actions.cuda())
        assert_equal([x.cpu() for x in (*after, *ours)], [*state, *results])


@pytest.mark.parametrize("bad", [-1, 7])
def test_actions_out_of_range_act_as_stay(bad):
    env = StagHuntEnv(CONFIGS[1], GAMES, "cuda", seed=6)
    ours, stayed = ([*after, *results] for after, *results in (env.transition(env.state, _all(a)) for a in (bad, 4)))
    assert_equal(ours, stayed)


def _all(action):
    return torch.full((GAMES, 3), action, device="cuda")


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2]])
def test_seats_never_wait_for_the_host_and_can_be_captured(config):
    env = StagHuntEnv(config, GAMES, "cuda", seed=1)
    tables = [["learner", "mixed", "switching", "first_stag"], ["mixed", "learner", "waiting", "learner"]]
    seats = Seats(env, tables, redraw=0.5, remember=True)
    learner_probs = torch.full((3, GAMES // 2, 7), 1 / 7, device="cuda")

    def step():
        actions = sample(seats.action_probs(env.state, learner_probs))
        seats.posterior_probs(seats.posterior())
        _, present_before, done = env.advance(actions)
        seats.update(actions, present_before, done)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(env.generator)
    with torch.cuda.graph(graph):
        step()
    before = seats.kinds.clone()
    for _ in range(40):
        graph.replay()
    changed = (seats.kinds != before).view(2, -1, 4).any(1)
    assert changed.tolist() == [[False, True, True, False], [True, False, False, False]]
    torch.testing.assert_close(seats.posterior().sum(2), torch.ones(GAMES, 4, device="cuda"))


# ---------------------------------------------------------------------------------------------------------------------
# hopplus_ppo.py


def run(run_dir, method, **changes):
    """-> what main returned, the state that was saved, what was logged"""
    flags = {**TINY_FLAGS, "run_dir": str(run_dir), "total_timesteps": 6 * 32, **changes}
    final = hop.main(hop.make_args(method, "cuda", **flags))
    checkpoint = Path(final["checkpoint"])
    state = torch.load(checkpoint, weights_only=True)["states"][0]
    return final, state, without_times(lines_of(checkpoint.parent))


@pytest.mark.parametrize(("method", "precision"), [("ppo", "tf32"), ("hopplus", "tf32"), ("hopplus", "bf16")])
def test_captured_iterations_equal_eager_ones(method, precision, tmp_path):
    found = [run(tmp_path / str(use), method, precision=precision, cudagraphs=use) for use in (False, True)]
    for part, value in found[0][1].items():
        assert same_tree(value, found[1][1][part]), part
    assert found[0][2] == found[1][2] and len(found[0][2]) == 6


@pytest.mark.parametrize("method", ["ppo", "hopplus"])
@pytest.mark.parametrize(("changes", "rel"), [({"compile": True}, 1e-3), ({"precision": "bf16"}, 0.1)])
def test_compiled_and_bf16_iterations_are_close(method, changes, rel, tmp_path):
    """After one iteration of 4 minibatches; compiled, the games are the same"""
    plain, fast = (
        run(tmp_path / str(number), method, **{"precision": "fp32", "total_timesteps": 32, **flags})[0]
        for number, flags in enumerate(({}, changes))
    )
    assert fast["charts/episodic_return"] == plain["charts/episodic_return"] or rel > 0.01
    for key in ("losses/value_loss", "losses/entropy"):
        assert fast[key] == pytest.approx(plain[key], rel=rel, abs=1e-5), key


@pytest.mark.parametrize("method", ["ppo", "hopplus"])
def test_a_resumed_run_is_the_same_bit_for_bit(method, tmp_path, monkeypatch):
    _, whole, lines = run(tmp_path / "whole", method, save_seconds=0.0)
    save, calls = Run.save, []

    def killed_at_the_fourth(run, content):
        calls.append(run)
        if len(calls) == 4:
            raise KeyboardInterrupt
        save(run, content)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "save", killed_at_the_fourth)
        run(tmp_path / "killed", method, save_seconds=0.0)
    (checkpoint,) = (tmp_path / "killed").glob("*/checkpoint.pt")
    hop.main(hop.make_args("ppo", "cuda", resume=str(checkpoint)))
    resumed = torch.load(checkpoint, weights_only=True)["states"][0]
    for part, value in whole.items():
        assert same_tree(value, resumed[part]), part
    assert without_times(lines_of(checkpoint.parent)) == lines
    with pytest.raises(ValueError, match="on cuda only"):
        hop.main(hop.make_args("ppo", "cpu", resume=str(checkpoint)))


HOSTLESS = [
    ("ppo", {}),
    ("ppo", {"seats": "learner,mixed,mixed"}),
    ("hopplus", {}),
    ("hopplus", {"seats": "learner,mixed,switching"}),
    ("hopplus", {"subgoals": "actions"}),
    ("hopplus", {"watched_starts": 0.5, "precision": "bf16"}),
]


@pytest.mark.parametrize(("method", "changes"), HOSTLESS)
def test_an_iteration_never_waits_for_the_host(method, changes):
    args = hop.make_args(method, "cuda", **{**TINY_FLAGS, **changes})
    table = hop.game.seats_table(args.seats, 3)
    state = hop.make_train_state(args, [table], [1], torch.device("cuda", 0))
    if state.watched is not None:
        hop.watch_rule_based(state)
    for _ in range(2):
        hop.train_iteration(state)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        hop.train_iteration(state)
        if state.watched is not None:
            hop.watch_rule_based(state)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("method", ["ppo", "ppo-omg", "hopplus"])
def test_adaptation_runs_on_the_gpu(method, tmp_path, monkeypatch):
    """Learners with and without a world model, in every mode, and every reference"""
    args = hop.make_args(method, "cuda", **TINY_FLAGS, num_seeds=2, run_dir=str(tmp_path))
    folder = Path(hop.main(args)["checkpoint"]).parent
    monkeypatch.setattr(adapt, "BEST_RESPONSE_GAMES", 32)
    words = ["--steps", "48", "--every", "8", "--repetitions", "6", "--imagined-games", "4", "--rounds", "1"]
    words += ["--best-response-steps", "4096", "--seats", "learner,nearest_hare,random", "learner,waiting,switching"]
    found = adapt.main(adapt.parse_args([str(folder), "--device", "cuda", *words]))
    rows = ("random", "Bayes hunter", "frozen", "learning", "best response")
    assert set(found) == {f"{row}/{key}" for row in rows for key in ("nearest_hare + random", "waiting + switching")}
    assert all(0 <= value <= 5 for value in found.values()) and found["Bayes hunter/nearest_hare + random"] > 0.5
