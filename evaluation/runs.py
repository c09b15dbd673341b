"""What the tools of this folder share: a run is loaded, its learners are seated beside anybody.

A run is loaded with the script that made it, or with an edited copy. CALLED is all that the tools
call of a script: a copy that keeps these can have other networks and another reward.
"""

import csv
import dataclasses
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stag_hunt_env as game
from evaluation import strangers  # noqa: F401 (they may sit in --seats)

import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (ROOT, ROOT / "benchmarks" / "baselines", Path())  # where scripts lie
CALLED = (
    "Args",
    "TrainState",
    "rollout",
    # What a learner believes and expects
    "perceive",
    "decide",
    "update_history",
    "goal_noise",
    "predict_actions",
    # What it imagines, and learns from that
    "measure_horizon",
    "imagined_step",
    "imagine",
    "make_ppo_batch",
    "ppo_update",
    # How it searches (hopplus_mcts.py)
    "plan_actions",
    # Of ppo_gru.py, which has no perceive, frozen_players.py also calls act and remember
)
FROZEN = {
    "compile": False,
    "share_parameters": False,
    "history_reset_prob": 0.0,
    "unsteady": 0.0,
    "offline_ratio": 0.0,
}


@dataclasses.dataclass
class RunArgs:
    run: Annotated[str, tyro.conf.Positional] = ""  # a run's folder
    script: str | None = None  # an edited copy of the script (None: the one that made the run)
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    seed: int = 1  # of the games


class Run(NamedTuple):
    folder: Path
    script: ModuleType
    args: object  # the script's Args, as in training
    networks: dict  # name -> weights [M, ...] of all learners, seed by seed
    replay: dict  # [rollouts, M, T, E, ...]

    @property
    def num_learners(self) -> int:
        """Of all seeds"""
        return len(next(iter(self.networks["policy"].values())))

    @property
    def learners_each(self) -> int:
        return self.num_learners // self.args.num_seeds


def refuse(wrong: bool, message: str) -> None:
    if wrong:
        sys.exit(f"error: {message}")


# ---- Loading
def find_checkpoint(run: str) -> Path:
    """Of a run's folder, or a checkpoint"""
    path = Path(run or "runs/RUN")
    path = path / "checkpoint.pt" if path.suffix != ".pt" else path
    if not path.exists():
        newest = max(Path("runs").glob("*/checkpoint.pt"), key=lambda x: x.stat().st_mtime, default=None)
        tool = Path(sys.argv[0]).name
        hint = f"the newest run: python evaluation/{tool} {newest.parent}" if newest else "no run in runs/"
        first = " (of several seeds, the first one's folder has it)" if path.parent.exists() else ""
        refuse(True, f"there is no {path}{first}; {hint}")
    return path


def load_script(file: Path) -> ModuleType:
    refuse(not file.is_file(), f"there is no {file}: name the run's script by --script FILE")
    spec = importlib.util.spec_from_file_location(f"loaded_{file.stem}", file.resolve())
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # where its dataclasses look for their module
    spec.loader.exec_module(script)
    return script


def load_run(run: str, script: str | None, device: str) -> Run:
    """script: a file, such as an edited copy (None: the one that made the run)"""
    path = find_checkpoint(run)
    try:
        checkpoint = torch.load(path, map_location=device, weights_only=True)
        other = "states" not in checkpoint
        refuse(other, f"{path} is a checkpoint of {checkpoint['format']}, not of a training script")
        flags = checkpoint["args"] | {"device": device}
        made_by = Path(checkpoint["script"]).name
        state = checkpoint["states"][0]
    except Exception as error:  # whatever torch makes of a file
        reason = str(error).partition("\n")[0]
        refuse(True, f"{path} is damaged, or no checkpoint of a training script: {reason}")
    files = [folder / made_by for folder in FOLDERS]
    file = next((file for file in files if file.is_file()), files[0])
    module = load_script(Path(script) if script else file)
    flags["config"] = game.StagHuntConfig(**flags["config"])
    known = {field.name for field in dataclasses.fields(module.Args)}
    if flags.keys() - known:
        print(f"{module.__file__} has no flags {', '.join(sorted(flags.keys() - known))}")
    args = module.Args(**{name: value for name, value in flags.items() if name in known})
    if getattr(args, "precision", "tf32") != "fp32":
        torch.backends.cuda.matmul.allow_tf32 = True
    games = state.get("games", {})
    replay = {name: x[: games["pushed"]] for name, x in games.get("replay", {}).items()}
    return Run(path.parent, module, args, state["networks"], replay)


# ---- Seating
def seats_of(run: Run, seats: str | None, others=()) -> list[str]:
    """Who sits where: as --seats says, else as in training. others: names of learned players"""
    known = ("learner", "mixed", "switching", *others)
    try:
        table = game.seats_table(seats or run.args.seats, run.args.config.num_players, known)
    except ValueError as error:
        refuse(True, f"--seats: {error}")
    refuse("learner" not in table, f"--seats {','.join(table)}: there is no learner")
    return table


def learner_number(run: Run, seed: int, seat: int) -> int:
    """Which learner of a run takes this seat: the one that was trained in it, else the first"""
    table = game.seats_table(run.args.seats, run.args.config.num_players)
    trained = [i for i, name in enumerate(table) if name == "learner"]
    place = trained.index(seat) if seat in trained else 0
    each = run.learners_each  # 1 if they share parameters
    return seed % run.args.num_seeds * each + place % each


def seat_learners(run: Run, tables, numbers, **changes):
    """A TrainState of frozen learners. tables: who sits where in each block of games; numbers [M]:
    which learners of the run are its learners (if it has any networks). What they carry over from
    game to game is what they carried over in training."""
    flags = FROZEN | {"state_reset_prob": 0.0, "num_seeds": len(tables), "seats": ",".join(tables[0])}
    flags["memory_discount"] = getattr(run.args, "history_decay", None)
    flags |= changes
    known = {field.name for field in dataclasses.fields(run.args)}
    args = dataclasses.replace(run.args, **{name: flags[name] for name in flags.keys() & known})
    state = run.script.TrainState(args, 0, torch.device(args.device))
    options = {"population": args.population, "redraw": args.redraw}
    state.games.seats = game.Seats(state.env, tables, **options)
    if run.networks:
        missing = ", ".join(state.networks.keys() - run.networks.keys())
        refuse(missing != "", f"{run.folder} has no network {missing}")
        for name, network in state.networks.items():
            load_params(network, {key: p[numbers] for key, p in run.networks[name].items()})
    return state


def copy_params(network) -> dict:
    return {name: p.detach().clone() for name, p in network.params.items()}


@torch.no_grad()
def load_params(network, params: dict) -> None:
    """In place: optimizers hold the tensors"""
    strange = ", ".join(sorted(network.params.keys() ^ params.keys()))
    refuse(strange != "", f"the run does not fit the script: only one of them has {strange}")
    for name, p in network.params.items():
        sizes = f"{list(params[name].shape)}, in the script {list(p.shape)}"
        refuse(p.shape != params[name].shape, f"the run does not fit the script: {name} is {sizes}")
        p.copy_(params[name])


def predict_others(run: Run, state, steps: dict):
    """Steps, a dict of [M, n, ...] -> MOA's probabilities of what the co-players do [M, n, K, 7]; who
    of them is on the board, bool [M, n, K]; what they do, int64 [M, n, K]"""
    mind = run.script.perceive(state, steps)
    noise = run.script.goal_noise(state.args, mind["posterior"])
    probs = run.script.predict_actions(state, mind, noise)
    config = state.args.config
    present = steps["board"][..., 1 : config.num_players] < config.num_cells
    return probs, present, steps["joint"][..., 1:].long()


# ---- Reporting
def interval(values) -> tuple[float, float]:
    """Mean and half width of its 95 % interval (Student's t); of one value NaN"""
    from scipy.special import stdtrit  # scipy.stats would take a second to import

    values = np.asarray(values, np.float64)
    count = len(values)
    if count < 2:
        return float(values.mean()), math.nan
    half = stdtrit(count - 1, 0.975) * values.std(ddof=1) / math.sqrt(count)
    return float(values.mean()), float(half)


def mean_text(mean: float, half: float) -> str:
    return f"{mean:.3f}" if math.isnan(half) else f"{mean:.3f} ± {half:.3f}"


def write_csv(path: Path, rows: list[dict]) -> None:
    columns = dict.fromkeys(name for row in rows for name in row)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {path}")
