"""What all tools of this folder share: a run is loaded, its learners are seated, games are played and counted.

A run is loaded with the script that made it, or with an edited copy, which must keep what the tools call.
"""

import csv
import dataclasses
import functools
import hashlib
import importlib.util
import math
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stag_hunt_env as game

import numpy as np
import torch
import tyro

ROOT = Path(game.__file__).resolve().parent
FROZEN = {  # flags of a learner that is only looked at
    "compile": False,
    "history_reset_prob": 0.0,
    "offline_ratio": 0.0,
}
SEEDS_FOR_INTERVAL = 3  # Student's t of two values is too wide to say anything
DECAY = 0.7  # of what old and new weights earned: how much a round counts beside the next

Seed = Annotated[int, ("0 to 2**40", 0, 2**40)]


class Run(NamedTuple):
    path: Path  # of the checkpoint
    checkpoint: dict
    script: ModuleType
    args: object  # the script's flags: the checkpoint's, changed by what stands after --
    device: torch.device

    @property
    def num_seeds(self) -> int:
        return self.checkpoint["args"]["num_seeds"]

    @property
    def networks(self) -> dict[str, dict]:
        """Name -> weights of all its learners"""
        return self.checkpoint["states"][0]["networks"]

    @property
    def planner(self) -> str:
        """How its learners search; none, also where the script cannot"""
        return getattr(self.args, "planner", "none")


@dataclasses.dataclass
class RunFlags:
    path: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="PATH")]] = tyro.MISSING
    """a checkpoint, or the run folder of any seed; after -- come flags of the script, for example -- --planner none"""
    script: str | None = None
    """load this script, such as an edited copy (None: the one that made the checkpoint)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to play; auto: on the GPU if there is one"""
    seed: Seed = 1
    """seed of the games"""


# ---- Loading


def parse_args(words: list[str], args_type, groups: dict, load=None, **defaults):
    """A tool's own flags, and the run that they name; load: another load_run"""
    end = words.index("--") if "--" in words else len(words)
    args = game.parse(args_type, groups, args_type(**defaults), words[:end])
    game.check_ranges(args)
    load = load or load_run
    args.run = load(args, words[end + 1 :])
    return args


def load_run(args, words: list[str]) -> Run:
    """The checkpoint, its script, and its flags changed by `words`"""
    device = game.resolve_device(args.device)
    path = game.find_checkpoint(args.path)
    content = open_checkpoint(path)
    made_by = content.get("script")
    game.refuse(made_by is None, f"{path} is no checkpoint of a training script: it does not say which one made it")
    script_path = ROOT / Path(made_by["name"]).name
    if args.script is not None:
        script_path = Path(args.script)
    script = load_script(script_path, made_by)
    checkpoint = game.load_checkpoint(path, content["format"])
    flags = load_flags(path, checkpoint["args"], script, args.device, check=not words)
    if words:
        trained_with = flags.config.num_players
        flags = game.parse(script.Args, script.GROUPS, flags, words)
        other = flags.config.num_players != trained_with
        game.refuse(other, f"--num-players: {path} was trained with {trained_with}")
        script.validate(flags)
    torch.backends.cuda.matmul.allow_tf32 = flags.precision != "fp32"
    return Run(path, checkpoint, script, flags, device)


def open_checkpoint(path: Path) -> dict:
    """What it holds; of its tensors nothing is read before it is asked for"""
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        reason = "it is damaged, or another program wrote it"
        raise game.UserError(f"{path} is no checkpoint of a training script: {reason}") from error
    game.refuse("format" not in content, f"{path} is no checkpoint: its format is not named")
    return content


def load_flags(path: Path, saved: dict, script: ModuleType, device: str, check: bool):
    """The flags of a checkpoint; the script's defaults where it has none"""
    try:
        saved = saved | {"config": game.StagHuntConfig(**saved["config"]), "device": device}
        known = saved.keys() & {field.name for field in dataclasses.fields(script.Args)}
        if saved.keys() - known:
            print(f"ignored, {script.__file__} has no such flags: {', '.join(sorted(saved.keys() - known))}")
        defaults = script.make_args(saved["method"], device)
        flags = dataclasses.replace(defaults, **{name: saved[name] for name in known})
        if check:
            script.validate(flags)
    except (ValueError, TypeError) as error:
        raise game.UserError(f"{path}: its flags are not those of {script.__file__}: {error}") from error
    return flags


def load_script(path: Path, made_by: dict) -> ModuleType:
    if not path.is_file():
        raise game.UserError(f"there is no {path}; the checkpoint was made by {made_by['name']}: --script FILE")
    game.refuse(path.suffix != ".py", f"--script {path} is no Python file: its name must end in .py")
    if hashlib.sha256(path.read_bytes()).hexdigest() != made_by["sha256"]:
        print(f"{path} is not, or no longer, the {made_by['name']} that made the checkpoint")
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # where its dataclasses look for their module
    spec.loader.exec_module(script)
    return script


# ---- Seating


class Seated(NamedTuple):
    """Learners of a run and the games that they sit in"""

    args: object
    games: object  # the script's Games
    networks: NamedTuple


def seats_of(run: Run, seats: str | None) -> list[str]:
    """Who sits where: as --seats says, else as in training"""
    if seats is None:
        seats = run.args.seats
    table = game.seats_table(seats, run.args.config.num_players)
    game.refuse("learner" not in table, f"--seats {','.join(table)}: there is no learner among them")
    return table


def learner_seats(table: list[str]) -> list[int]:
    return [seat for seat, name in enumerate(table) if name == "learner"]


def learner_index(checkpoint: dict, seed: int, seat: int) -> int:
    """The number of the checkpoint's learner that sat there; with shared parameters one for all seats"""
    saved = checkpoint["args"]
    table = game.seats_table(saved["seats"], saved["config"]["num_players"])
    if saved["share_parameters"]:
        return seed
    was = f"the checkpoint's are {','.join(table)}"
    game.refuse(table[seat] != "learner", f"--seats: seat {seat} was not a learner in training, {was}")
    return seed * table.count("learner") + table[:seat].count("learner")


def learner_indices(run: Run, table: list[str], num_seeds: int) -> list[int]:
    """Of all learners of the first seeds, in the seats of `table`"""
    indices = []
    for seed in range(num_seeds):
        for seat in learner_seats(table):
            indices.append(learner_index(run.checkpoint, seed, seat))
    return list(dict.fromkeys(indices))


def load_agents(run: Run, networks: NamedTuple, index: list[int]) -> None:
    """Gives learner m the networks of learner index[m] of the checkpoint."""
    saved = run.networks
    method = run.checkpoint["args"]["method"]
    present = {name: network for name, network in networks._asdict().items() if network is not None}
    for name in present:
        game.refuse(name not in saved, f"{run.path} has no {name} network (its --method: {method})")
    for name, network in present.items():
        try:
            network.load_state_dict({key: p[index] for key, p in saved[name].items()})
        except game.UserError as error:
            raise game.UserError(f"{run.path}: {name}.{error}") from error


def seat_learners(run: Run, tables: list[list[str]], seed: int, index: list[int], **changes) -> Seated:
    """The checkpoint's learners `index` [M], frozen, in the learner seats of `tables`"""
    args = dataclasses.replace(run.args, **FROZEN | changes)
    run.script.seed_everything([seed], rank=0, stream=0)
    games = run.script.Games(args, tables, run.device)
    games.seats.settle()  # --unsteady is for training
    networks = run.script.make_networks(args, index, run.device)
    load_agents(run, networks, index)
    return Seated(args, games, networks)


def learner_seeds(run: Run, state: Seated) -> torch.Tensor:
    """int64 [M]: the training seed of each learner"""
    seats = state.games.seats
    learners_each = seats.num_learners // seats.num_blocks
    return run.args.seed + torch.arange(seats.num_learners, device=run.device) // learners_each


# ---- Learning


def copy_params(network) -> dict:
    return {name: p.clone() for name, p in network.state_dict().items()}


def select_params(which: torch.Tensor, new: dict, old: dict) -> dict[str, torch.Tensor]:
    """Params of M stacked networks: the new where which bool [M], else the old"""
    return {name: torch.where(which.view(-1, *[1] * (p.dim() - 1)), p, old[name]) for name, p in new.items()}


def check_returns(run: Run, judged: str, *returns: torch.Tensor) -> None:
    """Of the new and the old policy, each [M]: nothing is decided by what is no number"""
    finite = torch.stack(returns).isfinite().all(0)
    if not finite.all():
        share = f"{int((~finite).sum())} of {len(finite)} repetitions"
        raise FloatingPointError(f"{run.path}: the {judged} is no number in {share}: nothing can be decided by it")


# ---- Playing


def play(run: Run, state, num_steps: int, infer=None):
    """state: Seated, or the script's TrainState; infer: another infer_opponents of the script"""
    return run.script.rollout(state.args, state.games, state.networks, num_steps, infer=infer)


def capture_later(function, capture):
    """The same function; from its second call on what `capture` makes of it, such as a CUDA graph"""

    def versions():
        yield function
        captured = capture(function)
        while True:
            yield captured

    version = versions()
    return lambda: next(version)()


def play_games(run: Run, state, each: int, skip: int = 0, play_on=None) -> dict[str, np.ndarray]:
    """Sums [blocks, places, N] over the first `each` games of every place, after the first `skip`: short games do not
    count more often. play_on() plays a few steps, as `play` does"""
    if play_on is None:
        play_on = functools.partial(play, run, state, 8)
    played = torch.zeros(state.games.env.num_envs, dtype=torch.int64, device=run.device)
    sums = defaultdict(float)
    while int(played.min()) < skip + each:
        _, outputs, episodes = play_on()
        check_decisions(run.path, outputs["log_probs"])
        prey = episodes["prey"]
        number = played + episodes["done"].cumsum(0)  # [T, B]
        counts = (episodes["done"] & (skip < number) & (number <= skip + each))[..., None]
        ended = {
            "games": counts.expand_as(prey),
            "steps": torch.ones_like(prey),  # also those of games that do not count
            "return": counts * episodes["return"],
            "stag": counts & (prey == game.HUNT_STAG),
            "hare": counts & (prey == game.HUNT_HARE),
        }
        for name, x in ended.items():
            by_place = x.double().unflatten(1, (state.games.seats.num_blocks, -1)).sum(0)
            sums[name] = sums[name] + by_place.cpu().numpy()
        played = number[-1]
    return dict(sums)


def check_decisions(path: Path, log_probs: torch.Tensor) -> None:
    """log_probs [M, ..., 7]: an action would be drawn from a NaN all the same"""
    bad = (~log_probs.isfinite()).any(-1)
    bad = bad.flatten(1).float().mean(1)
    if bad.any():
        share = f"{float(bad.max()):.1%} of its decisions"
        raise FloatingPointError(f"{path}: probabilities of learner {int(bad.argmax())} are no numbers in {share}")


# ---- Reporting


def check_writable(*paths: str | Path) -> None:
    """Refuses, before any game is played, what could not be written after it"""
    for path in map(Path, paths):
        try:
            there = path.exists()
            with open(path, "a"):
                pass
            if not there:
                path.unlink()
        except OSError as error:
            raise game.UserError(f"{path} cannot be written: {error.strerror}") from error


def interval(values) -> tuple[float, float]:
    """Mean and half width of its 95 % interval (Student's t)"""
    from scipy.special import stdtrit  # scipy.stats would take a second to import

    values = np.asarray(values, np.float64)
    half = math.nan
    if len(values) > 1:
        half = stdtrit(len(values) - 1, 0.975) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(half)


def interval_of_places(values) -> tuple[float, float, str]:
    """values [S, places]: of seeds, and of places with games of their own. -> mean, half width of
    its 95 % interval, and over what: seeds, or with too few of them games"""
    from scipy.special import stdtrit

    values = np.asarray(values, np.float64)
    seeds, places = values.shape
    if seeds >= SEEDS_FOR_INTERVAL:
        mean, half = interval(values.mean(1))
        return mean, half, "seeds"
    half = math.nan
    if places > 1:
        variance = values.var(1, ddof=1).sum() / places / seeds**2
        half = stdtrit(seeds * (places - 1), 0.975) * math.sqrt(variance)
    return float(values.mean()), float(half), "games"


def interval_text(over: str) -> str:
    """What stands behind ±"""
    if over == "seeds":
        return "±: 95 % interval over seeds"
    more_seeds = f"{SEEDS_FOR_INTERVAL} seeds or more: over seeds"
    return f"±: 95 % interval over games of these seeds ({more_seeds})"


def mean_text(mean: float, half: float) -> str:
    if math.isnan(half):
        return f"{mean:.3f}"
    return f"{mean:.3f} ± {half:.3f}"


def write_csv(path: str | Path, rows: list) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)
