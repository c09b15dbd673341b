"""On a GPU: the same game as on the CPU, captured and compiled too; the same training; no step waits for the host."""

import contextlib
from unittest import mock

import hopplus_mcts
import hopplus_ppo as hop
from evaluation import adapt
from evaluation.posterior import Posterior
from evaluation.strangers import STRANGER_PROBS, SwitchingSeats
from stag_hunt_env import PLAYER_PROBS, StagHuntConfig, StagHuntEnv, State, planes, sample

import pytest
import torch
from helpers import (
    lines_of,
    mixed_actions,
    random_kinds,
    resume,
    same_tree,
    seeded,
    tiny_args,
    train_tiny,
    without_times,
)

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def nothing_stays_fused():
    """--compile replaces functions of the script"""
    before = [dict(vars(script)) for script in (hop, hopplus_mcts)]
    yield
    for script, functions in zip((hop, hopplus_mcts), before, strict=True):
        vars(script).update(functions)


CONFIGS = [
    StagHuntConfig(final_time=6),
    StagHuntConfig(height=3, width=5, num_players=3, final_time=5, permute_ids=True),
    StagHuntConfig(height=6, width=4, num_stags=2, max_wall_pieces=2, final_time=9, steps_after_first_hunt=2),
]
GAMES, STEPS = 256, 25


@contextlib.contextmanager
def nothing_waits():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(function, generator):
    """A CUDA graph of the function, which may not wait for the host, after three calls -> the graph, its result"""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def snapshot(env, results):
    ends = env.final_return, env.final_prey, env.episode_return, env.observe(env.final_state)
    return [x.clone() for x in (*results, *env.state, *env.final_state, *ends)]


def assert_equal(ours, expected):
    for x, y in zip(ours, expected, strict=True):
        if x.is_floating_point():
            torch.testing.assert_close(x, y, atol=1e-6, rtol=0)
        else:
            assert torch.equal(x, y)


@pytest.mark.parametrize("config", CONFIGS)
def test_replays_of_a_captured_step_equal_eager_steps(config):
    """And compiled ones"""
    env = StagHuntEnv(config, GAMES, "cuda", seed=9)
    actions = torch.randint(7, (STEPS, GAMES, config.num_players), generator=seeded(1)).cuda()
    buffer = actions[0].clone()
    graph, results = captured(lambda: env.step(buffer), env.generator)
    env.reset(seed=3)
    eager, compiled = (StagHuntEnv(config, GAMES, "cuda", seed=3, compile=use) for use in (False, True))
    for acts in actions:
        buffer.copy_(acts)
        graph.replay()
        expected = snapshot(eager, eager.step(acts))
        assert_equal(snapshot(env, results), expected)
        assert_equal(snapshot(compiled, compiled.step(acts)), expected)


@pytest.mark.parametrize("config", CONFIGS)
def test_transition_is_that_of_the_cpu(config):
    cpu, gpu = StagHuntEnv(config, GAMES, seed=4), StagHuntEnv(config, GAMES, "cuda", seed=4)
    generator = seeded(5)
    state, kinds = cpu.initial_state(), random_kinds(cpu, generator)
    for _ in range(config.final_time + 1):
        there = State(*(x.cuda() for x in state))
        legal, cells = cpu.legal_actions(state), gpu.cells(there)
        assert torch.equal(cpu.observe(state), gpu.observe(there).cpu())
        assert torch.equal(cpu.cells(state), cells.cpu())
        walls = there.walls[:, None, : config.num_wall_cells].expand(-1, config.num_players, -1)
        assert torch.equal(planes(config, cells, walls), gpu.observe(there))
        assert torch.equal(legal, gpu.legal_actions(there).cpu())
        assert_equal([gpu.clock(there).cpu(), gpu.game_over(there).cpu()], [cpu.clock(state), cpu.game_over(state)])
        for probs in (*PLAYER_PROBS.values(), *STRANGER_PROBS.values()):
            assert_equal([probs(gpu, there, legal.cuda()).cpu()], [probs(cpu, state, legal)])
        actions = mixed_actions(cpu, state, kinds, 0.2, generator)
        state, *results = cpu.transition(state, actions)
        after, *ours = gpu.transition(there, actions.cuda())
        assert_equal([x.cpu() for x in (*after, *ours)], [*state, *results])


@pytest.mark.parametrize("bad", [-1, 7])
def test_actions_out_of_range_act_as_stay(bad):
    env = StagHuntEnv(CONFIGS[1], GAMES, "cuda", seed=6)
    found = []
    for action in (bad, 4):
        after, *results = env.transition(env.state, torch.full((GAMES, 3), action, device="cuda"))
        found.append([*after, *results])
    assert_equal(*found)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2]])
def test_seats_can_be_captured(config):
    env = StagHuntEnv(config, GAMES, "cuda", seed=1)
    tables = [["learner", "mixed", "switching", "first_stag"], ["mixed", "learner", "waiting", "learner"]]
    seats = SwitchingSeats(env, tables, redraw=0.5)
    posterior = Posterior(seats, remember=True)
    learner_probs = torch.full((3, GAMES // 2, 7), 1 / 7, device="cuda")

    def step():
        probs = seats.action_probs(env.state, learner_probs)
        actions = sample(probs)
        posterior.action_probs(probs)
        _, present_before, done = env.advance(actions)
        posterior.update(actions, present_before, done)
        seats.update(done)

    graph, _ = captured(step, env.generator)
    before = seats.kinds.clone()
    for _ in range(40):
        graph.replay()
    changed = (seats.kinds != before).view(2, -1, 4).any(1)
    assert changed.tolist() == [[False, True, True, False], [True, False, False, False]]
    torch.testing.assert_close(posterior.probs().sum(2), torch.ones(GAMES, 4, device="cuda"))


# ---- Whole runs
SEARCH = {"num_simulations": 6, "num_trees": 2}


def run(run_dir, method, **changes):
    """-> the state that was saved, what was logged"""
    flags = {"device": "cuda", "total_timesteps": 6 * 32, **changes}
    script = hop
    if method not in hop.METHODS:
        script = hopplus_mcts
        flags = SEARCH | flags
    (folder,) = train_tiny(run_dir, method, script, **flags)
    return script.load_checkpoint(folder, script.FORMAT)["states"][0], without_times(lines_of(folder))


CAPTURED = [("ppo", {}), ("hopplus", {}), ("hopplus", {"precision": "bf16"})]
CAPTURED += [("hopplus-mcts", {"precision": "fp32"})]
CAPTURED += [("hop", {"precision": "fp32", "goal_dim": 2, "root": "gumbel"})]


@pytest.mark.parametrize(("method", "changes"), CAPTURED)
def test_captured_iterations_equal_eager_ones(method, changes, tmp_path):
    """To the last bit, what is logged since the last of several rows too"""
    flags = {"log_every": 2, **changes}
    eager, captured = (run(tmp_path / str(use), method, cudagraphs=use, **flags) for use in (False, True))
    assert same_tree(captured[0], eager[0])
    assert captured[1] == eager[1] and len(eager[1]) == 3


FUSED = {"compile": True}
BF16 = {"precision": "bf16"}
RULES = {"root": "gumbel", "search_model": "env", "imagination": True}
CLOSE = [(method, {}, changes) for method in ("ppo", "hopplus") for changes in (FUSED, BF16)]
CLOSE += [("hopplus-mcts", flags, FUSED) for flags in ({"infer_in_tree": True}, RULES)]


@pytest.mark.parametrize(("method", "flags", "changes"), CLOSE)
def test_compiled_and_bf16_iterations_are_close(method, flags, changes, tmp_path):
    """After one iteration of 4 minibatches; compiled, the games are the same"""
    rows = []
    for number, more in enumerate(({}, changes)):
        given = {"precision": "fp32", "total_timesteps": 32, **flags, **more}
        rows.append(run(tmp_path / str(number), method, **given)[1][0])
    plain, fast = rows
    rel = 1e-3 if "compile" in changes else 0.1
    assert fast["charts/episodic_return"] == plain["charts/episodic_return"] or rel > 0.01
    for key in {"losses/value_loss", "losses/entropy", "search/gain", "search/kl", "search/depth"} & plain.keys():
        assert fast[key] == pytest.approx(plain[key], rel=rel, abs=1e-5), key


@pytest.mark.parametrize("method", ["ppo", "hopplus"])
def test_a_resumed_run_is_the_same_bit_for_bit(method, tmp_path):
    whole, lines = run(tmp_path / "whole", method, save_seconds=0.0)
    effects = [mock.DEFAULT] * 3 + [KeyboardInterrupt]
    killed_at_the_fourth = mock.Mock(wraps=hop.write_checkpoint, side_effect=effects)
    with mock.patch.object(hop, "write_checkpoint", killed_at_the_fourth), pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", method, save_seconds=0.0)
    (folder,) = (tmp_path / "killed").iterdir()
    resume(hop, folder)
    assert same_tree(hop.load_checkpoint(folder, hop.FORMAT)["states"][0], whole)
    assert without_times(lines_of(folder)) == lines


HOSTLESS = [
    ("ppo", {}),
    ("ppo", {"seats": "learner,mixed,mixed"}),
    ("hopplus", {}),
    ("hopplus", {"seats": "learner,mixed,mixed", "redraw": "0.5"}),
    ("hopplus", {"subgoals": "actions"}),
    ("hopplus", {"watched_starts": 0.5, "precision": "bf16"}),
]


@pytest.mark.parametrize(("method", "changes"), HOSTLESS)
def test_an_iteration_never_waits_for_the_host(method, changes):
    args = tiny_args(method, device="cuda", cudagraphs=False, **changes)
    stages = hop.make_stages(hop.TrainState(args, 0, torch.device("cuda", 0)))

    def iteration():
        for name in sorted(stages, reverse=True):  # watch, train
            stages[name]()

    for _ in range(2):
        iteration()
    with nothing_waits():
        iteration()


@pytest.mark.parametrize("method", ["ppo", "hopplus", "hopplus-mcts"])
def test_adaptation_runs_on_the_gpu(method, tmp_path):
    """Learners with and without a world model, and searching, in every mode, and every reference"""
    script = hop if method in hop.METHODS else hopplus_mcts
    folder, _ = train_tiny(tmp_path, method, script, device="cuda", num_seeds=2)
    flags = {"device": "cuda", "steps": 48, "every": 12, "repetitions": 6, "games": 4, "best_response_steps": 4096}
    seats = "learner,nearest_hare,random", "learner,waiting,switching"
    rows = adapt.main(adapt.Args(run=str(folder), seats=seats, search=True, **flags))
    modes = {"random", "Bayes hunter", "frozen", "learning", "best response"}
    assert {row["mode"] for row in rows} == modes
    assert len({row["co_players"] for row in rows}) == 2 and all(0 <= row["score"] <= 5 for row in rows)
