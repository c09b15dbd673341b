"""How fast are a whole iteration, a decision and the game alone; where does the time go?

    python benchmarks/speed.py                           # iterations, on the GPU if there is one
    python benchmarks/speed.py --cases decisions         # ms a decision of every method
    python benchmarks/speed.py --cases game              # env-steps/s with random legal actions
    python benchmarks/speed.py --flags="--method ppo --num-envs 4096"     # one case of your own

Medians of --repeats after warm-up, without logging. The models are not pretrained: a step costs the same.
A decision is one step of the game: all its learners perceive, infer, perhaps search, and act.
The game alone writes all observations; on a GPU it is compiled and in a CUDA graph.
Writes `<cases>_gpu.csv` (or `_cpu.csv`) to --folder, of --flags `own.csv`.
"""

import dataclasses
import importlib
import itertools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.sections import MCTS, PPO, SEARCHED
from evaluation.runs import write_csv
from stag_hunt_env import StagHuntConfig, StagHuntEnv

import torch
import tyro

FAST = "--compile --precision bf16"
ITERATIONS = {  # name: (script, flags)
    "cuda": {
        "PPO, width 64, 16384 games, bf16": (PPO, f"--method ppo {FAST} --num-envs 16384 --policy-hidden 64"),
        "PPO, width 128, 16384 games, bf16": (PPO, f"--method ppo {FAST} --num-envs 16384"),
        "PPO, defaults": (PPO, "--method ppo"),
        "PPO, defaults, compiled": (PPO, "--method ppo --compile"),
        "HOP+, defaults": (PPO, ""),
        "HOP+, defaults, compiled": (PPO, "--compile"),
        "HOP+, defaults, 8x8": (PPO, "--height 8 --width 8"),
        "HOP+, 16384 games, half real, bf16": (PPO, f"{FAST} --num-envs 16384"),
        "HOP+ MCTS, defaults": (MCTS, ""),
    },
    "cpu": {
        "PPO, defaults": (PPO, "--method ppo"),
        "HOP+, defaults": (PPO, ""),
        "HOP+ MCTS, defaults": (MCTS, ""),
    },
}
DECISION_GAMES = {"cuda": (1, 4096), "cpu": (1, 64)}
ALONE_GAMES = {"cuda": (4096, 65536, 524288), "cpu": (4096,)}
DECISION_STEPS = 8  # measured together; then policy and value look once more, as in training


@dataclasses.dataclass
class Args:
    cases: Literal["iterations", "decisions", "game"] = "iterations"
    only: str = ""  # only cases whose name begins with this
    flags: str | None = None  # measure only a script with these flags
    script: str = PPO  # --flags: of which script
    repeats: int = 10  # to take the median of
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    folder: str = "runs/speed"  # where the table goes


def median_seconds(function, repeats: int, device: str) -> float:
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def make_state(script: str, flags: str, device: str):
    """-> the script, its TrainState with fresh networks, as a run with these flags has it"""
    name = Path(script).stem
    sys.modules.pop(name, None)  # --compile changes the module
    module = importlib.import_module(name)
    sys.argv = [script, *flags.split(), "--device", device]
    args = module.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = args.precision != "fp32"
    if device == "cuda":
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return module, module.TrainState(args, 0, torch.device(device))


def measure_iteration(script: str, flags: str, repeats: int, device: str) -> dict[str, float]:
    """One iteration and its stages"""
    module, state = make_state(script, flags, device)
    args = state.args
    if state.watched is not None:  # the models learn from these games
        state.watched.push(module.rollout(state, state.watched)[0])
    stages = module.make_stages(state)
    cycle = 1
    if "watch" in stages:
        cycle = args.replay_rollouts  # iterations between two in which rule-based games are watched
    passed = []

    def train():
        if "watch" in stages:
            stages["watch"]()
        times = {}
        for _ in range(cycle):
            stages["train"]()
            if device == "cuda":
                torch.cuda.synchronize()
            for (_, begin), (name, end) in zip(state.times, state.times[1:], strict=False):
                took = 1000 * (end - begin) if device == "cpu" else begin.elapsed_time(end)
                times[name] = times.get(name, 0.0) + took / cycle
        passed.append(times)

    full = median_seconds(train, repeats, device) / cycle
    steps = args.num_steps * args.num_envs
    row = {
        "env_steps_per_s": steps / full,
        "agent_steps_per_s": steps * args.config.num_players / full,
        "iteration_ms": 1000 * full,
    }
    for name in passed[0]:
        row[f"{name}_ms"] = statistics.median(times[name] for times in passed[3:])
    if device == "cuda":
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return row


def measure_decision(script: str, flags: str, repeats: int, device: str) -> dict[str, float]:
    flags += f" --num-steps {DECISION_STEPS} --imagination-horizon {DECISION_STEPS} --num-minibatches 1"
    module, state = make_state(script, flags, device)

    def play():
        return module.rollout(state, state.games)

    play()
    play = module.capture(play, state)
    return {"milliseconds": 1000 * median_seconds(play, repeats, device) / DECISION_STEPS}


def random_actions(env, uniform) -> torch.Tensor:
    """Of each player the legal action whose stretch of [0, 1) holds the number"""
    edges = env.legal_actions(env.state).cumsum(-1)
    return (edges[..., :-1] <= uniform[..., None] * edges[..., -1:]).sum(-1)


def measure_game(side: int, games: int, repeats: int, device: str) -> dict[str, float]:
    config = StagHuntConfig(height=side, width=side)
    env = StagHuntEnv(config, games, device, 1, compile=device == "cuda")
    choose = torch.compile(random_actions, dynamic=False) if device == "cuda" else random_actions

    def play():
        for _ in range(10):
            uniform = torch.rand(games, config.num_players, generator=env.generator, device=device)
            env.step(choose(env, uniform))

    if device == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):  # compiles
            play()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(env.generator)
        with torch.cuda.graph(graph):
            play()
        play = graph.replay
    return {"env_steps_per_s": 10 * games / median_seconds(play, repeats, device)}


def choose_cases(args: Args) -> dict[str, tuple]:
    """Name -> what to measure, and with what"""
    if args.flags is not None:
        return {"own": (measure_iteration, args.script, args.flags)}
    if args.cases == "decisions":
        cases = {}
        for name, (script, flags, _) in SEARCHED.items():
            for games in DECISION_GAMES[args.device]:
                size = "1 game" if games == 1 else f"{games} games"
                cases[f"{name}, {size}"] = measure_decision, script, f"{flags} --num-envs {games}"
    elif args.cases == "game":
        cases = {}
        for side, games in itertools.product((4, 8), ALONE_GAMES[args.device]):
            cases[f"{side}x{side}, {games} games"] = measure_game, side, games
    else:
        cases = {name: (measure_iteration, *case) for name, case in ITERATIONS[args.device].items()}
    return {name: case for name, case in cases.items() if name.startswith(args.only)}


def main(args: Args) -> list[dict]:
    machine = f"{os.cpu_count()} CPU cores, {torch.get_num_threads()} threads"
    if args.device == "cuda":
        machine = torch.cuda.get_device_name()
    print(f"{machine}, torch {torch.__version__}")
    kind = "gpu" if args.device == "cuda" else "cpu"
    path = Path(args.folder) / ("own.csv" if args.flags is not None else f"{args.cases}_{kind}.csv")
    rows = []
    for name, (measure, *what) in choose_cases(args).items():
        figures = {key: f"{x:.5g}" for key, x in measure(*what, args.repeats, args.device).items()}
        print(f"{name}: " + ", ".join(" ".join(item) for item in figures.items()), flush=True)
        rows.append({"case": name} | figures)
    write_csv(path, rows)
    return rows


if __name__ == "__main__":
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    main(tyro.cli(Args))
