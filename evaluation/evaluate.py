"""Frozen learners of a checkpoint, in any seats: what they earn and hunt, and a GIF of three games.

    python evaluation/evaluate.py runs/RUN                                   # in the seats of the training
    python evaluation/evaluate.py runs/RUN --seats learner,nearest_stag,nearest_hare,random
    python evaluation/evaluate.py runs/RUN --inspect                         # and a page that shows what they think
    python evaluation/evaluate.py runs/RUN --script my_copy.py -- --planner mcts   # an edited copy, flags of its own

RUN is the run folder of any seed, or a checkpoint. What follows `--` are flags of the script, on top of the
checkpoint's. Beside the checkpoint: `evaluation_<seats>.csv` and `.gif`; who searches has the planner in the name.

**The contract.** `evaluation/` loads the script that made the checkpoint, or an edited copy of it, which must keep:
`Args`, `GROUPS`, `make_args`, `validate`, `load_checkpoint`, `make_train_state`, `TrainState`, `Networks`, `rollout`,
`capture`; for `adapt.py` also `imagine`, `make_ppo_batch`, `real_samples`, `ppo_update`, `opponent_model_losses`,
`train_opponent_models`, `measure_horizon`, `moa_metrics`, `train_iteration`, `make_optimizer`, `Transitions`,
`Replay`, `history_decay`, `history_after_game`; for `inspect.py` also `entity_views`, `infer_opponents`,
`predict_actions`, `evaluate_policy`, `predict_step`, `goal_noise`, `goal_mean`, `history_decay`, `stack_steps`,
`make_optimizer`; for `partners.py` also `infer_opponents`, `history_decay`.
"""

import contextlib
import csv
import dataclasses
import hashlib
import importlib.util
import math
import pickle
import re
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
PARTS = re.split(r"for `\w+\.py`", __doc__.split("must keep:")[1])
CONTRACT, FOR_ADAPT, FOR_INSPECT, FOR_PARTNERS = (re.findall(r"`(\w+)`", part) for part in PARTS)

Seed = Annotated[int, ("0 to 2**40", 0, 2**40)]


class Run(NamedTuple):
    path: Path  # of the checkpoint
    checkpoint: dict
    script: ModuleType
    args: object  # the script's flags: the checkpoint's, changed by what stands after --
    device: torch.device


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


@dataclasses.dataclass
class EvaluateFlags:
    seats: str | None = None
    """who sits where, one name a seat: learner, mixed, a player or a stranger (None: as in training)"""
    games: game.Count = 1000
    """games per seed of the run"""
    inspect: bool = False
    """also write inspect_<seats>.html, what the learners of the first seed think in 8 games (see inspect.py)"""


@dataclasses.dataclass
class Args(RunFlags, EvaluateFlags):
    path: str = tyro.MISSING
    run: Run | None = None


GROUPS = {"run": RunFlags, "evaluation": EvaluateFlags}


def parse_args(words: list[str], args_type=Args, groups=GROUPS, contract=CONTRACT, **defaults):
    """Own flags, and the run that they name"""
    end = words.index("--") if "--" in words else len(words)
    args = game.parse(args_type, groups, args_type(**defaults), words[:end])
    game.check_ranges(args)
    args.run = load_run(args, words[end + 1 :], contract)
    return args


def open_checkpoint(path: Path) -> dict:
    """What it holds; of its tensors nothing is read before it is asked for"""
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError as error:
        raise game.UserError(f"{path} is no checkpoint of a training script: {error.strerror}") from error
    except pickle.UnpicklingError as error:
        raise game.UserError(f"{path} is no checkpoint: it holds more than tensors, numbers and texts") from error
    except Exception as error:
        reason = "it is damaged, or another program wrote it"
        raise game.UserError(f"{path} is no checkpoint of a training script: {reason}") from error
    game.refuse(not isinstance(found, dict), f"{path} is no checkpoint: it holds a {type(found).__name__}")
    game.refuse(not isinstance(found.get("format"), str), f"{path} is no checkpoint: its format is not named")
    return found


def check_checkpoint(path: Path, checkpoint: dict) -> None:
    """Refuses one without what all scripts of this folder read"""
    saved, states = checkpoint["args"], checkpoint["states"]
    types = {"config": dict, "method": str, "seats": str | None, "share_parameters": bool}
    types |= {"seed": int, "num_seeds": int}
    game.refuse(not isinstance(saved, dict), f"{path}: its args are not those of a training script")
    for name, kind in types.items():
        right = name in saved and isinstance(saved[name], kind)
        game.refuse(not right, f"{path}: its args are not those of a training script: {name} is wrong or missing")
    game.refuse(saved["num_seeds"] < 1, f"{path}: its args are wrong: num_seeds is {saved['num_seeds']}")
    first = states[0] if isinstance(states, list) and states else None
    networks = first.get("networks") if isinstance(first, dict) else None
    whole = isinstance(networks, dict) and all(isinstance(weights, dict) for weights in networks.values())
    game.refuse(not whole, f"{path}: it holds no networks")


def load_run(args, words: list[str], contract: list[str]) -> Run:
    """The checkpoint, its script, and its flags changed by `words`"""
    device, path = game.resolve_device(args.device), game.find_checkpoint(args.path)
    found = open_checkpoint(path)
    made_by = found.get("script")
    named = isinstance(made_by, dict) and all(isinstance(made_by.get(name), str) for name in ("name", "sha256"))
    game.refuse(not named, f"{path} is no checkpoint of a training script: it does not say which one made it")
    script = ROOT / Path(made_by["name"]).name if args.script is None else Path(args.script)
    script = load_script(script, made_by, contract)
    checkpoint = script.load_checkpoint(path, found["format"], {"args": dict, "states": list})
    check_checkpoint(path, checkpoint)
    flags = load_flags(path, checkpoint["args"], script, args.device, check=not words)
    if words:
        flags, trained = game.parse(script.Args, script.GROUPS, flags, words), flags.config.num_players
        game.refuse(flags.config.num_players != trained, f"--num-players: {path} was trained with {trained}")
        script.validate(flags)
    torch.backends.cuda.matmul.allow_tf32 = flags.precision != "fp32"
    return Run(path, checkpoint, script, flags, device)


def load_flags(path: Path, saved: dict, script: ModuleType, device: str, check: bool):
    """The flags of a checkpoint; the script's defaults where it has none"""
    try:
        saved = saved | {"config": game.StagHuntConfig(**saved["config"]), "device": device}
        known = saved.keys() & {field.name for field in dataclasses.fields(script.Args)}
        if saved.keys() - known:
            print(f"ignored, {script.__file__} has no such flags: {', '.join(sorted(saved.keys() - known))}")
        flags = dataclasses.replace(script.make_args(saved["method"], device), **{name: saved[name] for name in known})
        if check:
            script.validate(flags)
    except (ValueError, TypeError, AttributeError) as error:
        raise game.UserError(f"{path}: its flags are not those of {script.__file__}: {error}") from error
    return flags


def load_script(path: Path, made_by: dict, contract: list[str]) -> ModuleType:
    if not path.is_file():
        raise game.UserError(f"there is no {path}; the checkpoint was made by {made_by['name']}: --script FILE")
    game.refuse(path.suffix != ".py", f"--script {path} is no Python file: its name must end in .py")
    if hashlib.sha256(path.read_bytes()).hexdigest() != made_by["sha256"]:
        print(f"{path} is not, or no longer, the {made_by['name']} that made the checkpoint")
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # where its dataclasses look for their module
    try:
        spec.loader.exec_module(script)
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}: {(error.text or '').strip()}"
        raise game.UserError(f"--script {path} cannot be read: {error.msg} ({where})") from error
    missing = [name for name in contract if not hasattr(script, name)]
    game.refuse(bool(missing), f"--script {path} has no {', '.join(missing)}")
    return script


@contextlib.contextmanager
def replaced(script: ModuleType, name: str, function):
    """The script calls `function` in place of its own"""
    own = getattr(script, name, None)
    setattr(script, name, function)
    try:
        yield
    finally:
        setattr(script, name, own)


def seats_of(run: Run, seats: str | None) -> list[str]:
    """Who sits where: as --seats says, else as in training"""
    table = game.seats_table(run.args.seats if seats is None else seats, run.args.config.num_players)
    game.refuse("learner" not in table, f"--seats {','.join(table)}: there is no learner among them")
    return table


def learner_index(checkpoint: dict, seed: int, seat: int) -> int:
    """The number of the checkpoint's learner that sat there; with shared parameters one for all seats"""
    saved = checkpoint["args"]
    table = game.seats_table(saved["seats"], saved["config"]["num_players"])
    if saved["share_parameters"]:
        return seed
    was = f"the checkpoint's are {','.join(table)}"
    game.refuse(table[seat] != "learner", f"--seats: seat {seat} was not a learner in training, {was}")
    return seed * table.count("learner") + table[:seat].count("learner")


def load_agents(run: Run, state, index: list[int]) -> None:
    """Gives learner m of `state` the networks of learner index[m] of the checkpoint."""
    saved, method = run.checkpoint["states"][0]["networks"], run.checkpoint["args"]["method"]
    networks = {name: network for name, network in state.networks._asdict().items() if network is not None}
    for name in networks:
        game.refuse(name not in saved, f"{run.path} has no {name} network (its --method: {method})")
    for name, network in networks.items():
        enough = all(isinstance(p, torch.Tensor) and p.dim() and len(p) > max(index) for p in saved[name].values())
        game.refuse(not enough, f"{run.path}: its {name} network is not one of {max(index) + 1} learners")
        try:
            network.load_state_dict({key: p[index] for key, p in saved[name].items()})
        except game.UserError as error:
            raise game.UserError(f"{run.path}: {name}.{error}") from error


def make_state(run: Run, tables: list[list[str]], seeds: list[int], index: list[int], **changes):
    """A TrainState in which the checkpoint's learners `index` [M] sit in the learner seats of `tables`"""
    changes = {"compile": False, "history_reset_prob": 0.0, "offline_ratio": 0.0} | changes
    args = dataclasses.replace(run.args, **changes)
    state = run.script.make_train_state(args, tables, seeds, run.device)
    load_agents(run, state, index)
    return state


def check_decisions(path: Path, log_probs: torch.Tensor) -> None:
    """log_probs [M, ..., 7]: an action would be drawn from a NaN all the same"""
    bad = (~log_probs.isfinite()).any(-1).flatten(1).float().mean(1)
    if bad.any():
        share = f"{float(bad.max()):.1%} of its decisions"
        raise FloatingPointError(f"{path}: probabilities of learner {int(bad.argmax())} are no numbers in {share}")


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


def play(run: Run, s, num_steps: int):
    return run.script.rollout(s.args, s.env, s.seats, s.networks, s.rollout_state, num_steps)


def play_games(run: Run, state, each: int, skip: int = 0) -> dict[str, np.ndarray]:
    """Sums [blocks, places, N] over the first `each` games of every place, after the first `skip`: short games do not
    count more often."""
    played = torch.zeros(state.env.num_envs, dtype=torch.int64, device=run.device)
    sums = defaultdict(float)
    while int(played.min()) < skip + each:
        _, outputs, episodes = play(run, state, 8)
        check_decisions(run.path, outputs["log_probs"])
        number = played + episodes["done"].cumsum(0)  # [T, B]
        prey, counts = episodes["prey"], (episodes["done"] & (skip < number) & (number <= skip + each))[..., None]
        found = {"games": counts.expand_as(prey), "return": counts * episodes["return"]}
        found |= {"stag": counts & (prey == game.HUNT_STAG), "hare": counts & (prey == game.HUNT_HARE)}
        for name, x in found.items():
            sums[name] = sums[name] + x.double().unflatten(1, (state.seats.num_blocks, -1)).sum(0).cpu().numpy()
        played = number[-1]
    return dict(sums)


def interval(values) -> tuple[float, float]:
    """Mean and half width of its 95 % interval (Student's t)"""
    from scipy.special import stdtrit  # scipy.stats would take a second to import

    values, half = np.asarray(values, np.float64), math.nan
    if len(values) > 1:
        half = stdtrit(len(values) - 1, 0.975) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(half)


def mean_text(mean: float, half: float) -> str:
    return f"{mean:.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}")


def write_csv(path: str | Path, rows: list) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def film(run: Run, state, path: Path, games: int = 3) -> None:
    """A GIF of the next games in the first place"""
    env, seats, frames = state.env, state.seats, []
    while games:
        before, returns = game.copy_state(env.state), env.episode_return.clone()
        names = ["learner" if kind < 0 else seats.names[kind] for kind in seats.kinds[0].tolist()]
        transitions, _, episodes = play(run, state, 1)
        actions = transitions.joint[0, 0, 0].roll(int(seats.learner_seat[0, 0]))  # from the learner's ego order
        frames.append(game.render_rgb(env.config, before, returns, names=names, hunting=actions))
        if episodes["done"][0, 0]:
            frames += [game.render_rgb(env.config, env.final_state, env.final_return, names=names)] * 3
            games -= 1
    game.write_gif(str(path), frames)


def main(args: Args) -> dict[str, float]:
    """-> mean return of each seat"""
    run, config = args.run, args.run.args.config
    num_seeds, planner = run.checkpoint["args"]["num_seeds"], getattr(run.args, "planner", "none")
    table = seats_of(run, args.seats)
    sitting = [seat for seat, name in enumerate(table) if name == "learner"]
    title = run.path.parent / (f"evaluation_{'-'.join(table)}" + ("" if planner == "none" else f"_{planner}"))
    page = run.path.parent / f"inspect_{'-'.join(table)}.html"
    check_writable(f"{title}.csv", f"{title}.gif", *([page] if args.inspect else []))
    each, changes = math.ceil(args.games / 256), {"seats": ",".join(table), "imagination": False}
    places, seeds = math.ceil(args.games / each), list(range(args.seed, args.seed + num_seeds))
    index = list(dict.fromkeys(learner_index(run.checkpoint, s, i) for s in range(num_seeds) for i in sitting))
    state = make_state(run, [table] * num_seeds, seeds, index, num_envs=places, **changes)
    sums = {name: x.sum(1) for name, x in play_games(run, state, each).items()}  # [S, N]
    returns, stag, hare = (sums[key] / sums["games"] for key in ("return", "stag", "hare"))
    print(f"{config.setting}, {run.path}, frozen, planner {planner}; {places * each} games a seed, {num_seeds} seed(s)")
    rows = [["seat", "player", "return", "half_width_95", "stag_share", "hare_share"]]
    for i, name in enumerate(table):
        rows.append([i, name, *interval(returns[:, i]), stag[:, i].mean(), hare[:, i].mean()])
        print(f"seat {i} {name:<14} return {mean_text(*rows[-1][2:4])}   stag {rows[-1][4]:.2f} hare {rows[-1][5]:.2f}")
    write_csv(f"{title}.csv", rows)
    state = make_state(run, [table], seeds[:1], index[: len(index) // num_seeds], num_envs=1, **changes)
    film(run, state, Path(f"{title}.gif"))
    print(f"wrote {title}.csv and .gif")
    if args.inspect:
        import inspector

        inspector.write_page(page, inspector.inspect_run(run, args.seats, seed=args.seed))
        print(f"wrote {page}")
    return {f"return/player_{i}": float(mean) for i, mean in enumerate(returns.mean(0))}


if __name__ == "__main__":
    game.command_line(parse_args, main)
