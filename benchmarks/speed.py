"""How fast are the game, the game with its learners' networks, and a whole iteration; where does the time go?

    python benchmarks/speed.py                           # iterations, on the GPU if there is one
    python benchmarks/speed.py --cases decisions         # ms a decision of every method
    python benchmarks/speed.py --flags="--method ppo --num-envs 4096"     # one case of your own

Medians of --repeats after warm-up, without logging. The models are not pretrained: a step costs the same.
A decision is one step of the game: all its learners perceive, infer, perhaps search, and act.
Writes `<cases>_gpu.csv` (or `_cpu.csv`) to --folder, of --flags `own.csv`.
"""

import dataclasses
import importlib
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.sections import MCTS, PPO, TIMED
from benchmarks.tables import write
from stag_hunt_env import NUM_ACTIONS

import torch
import tyro

FAST = "--compile --precision bf16"
HALF_REAL = f"{FAST} --ppo-real-ratio 0.5"
ITERATIONS = {  # name: (script, flags)
    "cuda": {
        "PPO, width 64, 16384 games, bf16": (PPO, f"--method ppo {FAST} --num-envs 16384 --policy-hidden 64"),
        "PPO, width 128, 16384 games, bf16": (PPO, f"--method ppo {FAST} --num-envs 16384"),
        "PPO, defaults": (PPO, "--method ppo"),
        "PPO, defaults, compiled": (PPO, "--method ppo --compile"),
        "HOP+, defaults": (PPO, ""),
        "HOP+, defaults, compiled": (PPO, "--compile"),
        "HOP+, defaults, 8x8": (PPO, "--height 8 --width 8"),
        "HOP+, 16384 games, half real, bf16": (PPO, f"{HALF_REAL} --num-envs 16384"),
        "PPO, 1024 games, 1 seed": (PPO, f"--method ppo {FAST} --num-envs 1024"),
        "PPO, 1024 games, 16 seeds": (PPO, f"--method ppo {FAST} --num-envs 1024 --num-seeds 16"),
        "HOP+, 1024 games, 1 seed": (PPO, f"{HALF_REAL} --num-envs 1024"),
        "HOP+, 1024 games, 16 seeds": (PPO, f"{HALF_REAL} --num-envs 1024 --num-seeds 16"),
        "HOP+ MCTS, defaults": (MCTS, ""),
    },
    "cpu": {
        "PPO, defaults": (PPO, "--method ppo"),
        "HOP+, defaults": (PPO, ""),
        "HOP+ MCTS, defaults": (MCTS, ""),
    },
}
DECISION_GAMES = {"cuda": (1, 4096), "cpu": (1, 64)}
DECISION_STEPS = 8  # measured together; then policy and value look once more, as in training


@dataclasses.dataclass
class Args:
    cases: Literal["iterations", "decisions"] = "iterations"
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


def captured(module, state, function):
    function()
    return module.capture(function, state)


def measure_iteration(script: str, flags: str, repeats: int, device: str) -> dict[str, float]:
    """One iteration, its stages, and the game in it"""
    module, state = make_state(script, flags, device)
    args, env = state.args, state.env
    shape = args.num_steps, env.num_envs, args.config.num_players
    actions = torch.randint(NUM_ACTIONS, shape, device=device)

    def play_at_random():
        for step in range(args.num_steps):
            env.advance(actions[step])

    plays = {"game": play_at_random, "game_and_policy": lambda: module.rollout(state, state.games)}
    seconds = {}
    for name, play in plays.items():
        seconds[name] = median_seconds(captured(module, state, play), repeats, device)
    stages = module.make_stages(state)
    cycle = 1
    if "watch" in stages:
        cycle = args.replay_rollouts  # iterations between two in which rule-based games are watched
        stages["watch"]()
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
    steps = args.num_steps * env.num_envs
    row = {
        "env_steps_per_s": steps / full,
        "agent_steps_per_s": steps * args.config.num_players / full,
        "game_only_env_steps_per_s": steps / seconds["game"],
        "game_and_policy_env_steps_per_s": steps / seconds["game_and_policy"],
        "iteration_ms": 1000 * full,
    }
    for name in passed[0]:
        row[f"{name}_ms"] = statistics.median(times[name] for times in passed[3:])
    if device == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return row


def measure_decision(script: str, flags: str, repeats: int, device: str) -> dict[str, float]:
    flags += f" --num-steps {DECISION_STEPS} --imagination-horizon {DECISION_STEPS} --num-minibatches 1"
    module, state = make_state(script, flags, device)
    play = captured(module, state, lambda: module.rollout(state, state.games))
    return {"milliseconds": 1000 * median_seconds(play, repeats, device) / DECISION_STEPS}


def choose_cases(args: Args) -> dict[str, tuple]:
    """Name -> what to measure, and with what"""
    if args.flags is not None:
        return {"own": (measure_iteration, args.script, args.flags)}
    if args.cases == "decisions":
        cases = {}
        for name, (script, flags, _) in TIMED.items():
            for games in DECISION_GAMES[args.device]:
                cases[f"{name}, {games} game(s)"] = measure_decision, script, f"{flags} --num-envs {games}"
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
    for name, (measure, script, flags) in choose_cases(args).items():
        row = {"case": name, "script": script, "flags": flags, "machine": machine, "torch": torch.__version__}
        figures = measure(script, flags, args.repeats, args.device)
        print(f"{name}: " + ", ".join(f"{key} {value:.5g}" for key, value in figures.items()), flush=True)
        rows.append(row | figures)
        write(path, rows)
    print(f"wrote {path}")
    return rows


if __name__ == "__main__":
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    main(tyro.cli(Args))
