"""Runs the experiments that answer the project's questions on one GPU, and draws their tables.

    python benchmarks/experiments.py --list
    python benchmarks/experiments.py --section stays-8x8 --parallel 6
    python benchmarks/experiments.py --section others 7 --parallel 5     # whom they meet, and learners
    python benchmarks/experiments.py --section pretraining moa --parallel 1    # seconds are compared
    python benchmarks/experiments.py --draw                              # only tables, from docs/data

Every command of a run is made once (its folder in --run-dir then has NUMBER.seconds), and training
that was cut off goes on from its checkpoint; sections share runs. HOP+ is hopplus_ppo.py with its
defaults, but for the game and its seats, and for what section `dose` asks about.

What is run stands in sections.py, what is printed and drawn in tables.py. Settings were chosen with
seeds below 11 (docs/data/tuning.csv) and are tested with seeds from 11 on.
"""

import concurrent.futures
import dataclasses
import json
import math
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import tables
from benchmarks.sections import GRU, SECTIONS, Run, other_runs
from benchmarks.tables import HARDEST, read, read_csv, write

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parent.parent
MOA_MEASURES = ("NLL", "top-1", "recall")
FOLLOWED = {  # name in our tables: key in metrics.jsonl
    "return": "charts/episodic_return",
    "stag": "charts/stag_share",
    "real_samples": "real/samples",
    "imagined_samples": "imagined/samples",
}


@dataclasses.dataclass
class Args:
    section: tuple[str, ...] = tuple(SECTIONS)  # which sections
    list: bool = False  # only say what there is
    draw: bool = False  # only print the tables and draw the figures, from docs/data
    parallel: int = 3  # runs at once
    extra: str = ""  # flags of all trainings, for example to try them on a CPU
    run_dir: str = "runs/experiments"  # where the runs go
    docs: str = str(ROOT / "docs")  # tables go to data, figures to results in here


# ---- Running
def commands_of(args: Args, run: Run) -> list[str]:
    """What goes before it, the training, what follows it"""
    return [*run.before, f"{run.script} {run.flags} {args.extra}", *run.then]


def folder_of(args: Args, run: Run) -> Path:
    text = " ".join(" ".join(commands_of(args, run)).split())
    name = "".join(c if c.isalnum() else "_" for c in text)
    return Path(args.run_dir).resolve() / f"{name[:120]}_{zlib.crc32(text.encode()):08x}"


def training_of(args: Args, run: Run) -> Path:
    """The folder of its training command"""
    return folder_of(args, run) / str(len(run.before))


def is_trained(args: Args, run: Run) -> bool:
    return training_of(args, run).with_suffix(".seconds").exists()


def run_folder(folder: Path) -> str:
    """Of several seeds the first one's has the checkpoint"""
    found = sorted(folder.glob("*/checkpoint.pt"))
    if not found:
        raise FileNotFoundError(f"{folder} has no checkpoint")
    return str(found[0].parent)


def words_of(args: Args, run: Run, command: str) -> list[str]:
    """RUN: the folder of the training; BEFORE_0: of what went before; OTHERS_4x4: NAME=FOLDER of the
    learners of section `others` on that board"""
    words = []
    for word in command.split():
        kind, _, name = word.partition("_")
        if word == "RUN":
            words.append(run_folder(training_of(args, run)))
        elif kind == "BEFORE":
            words.append(run_folder(folder_of(args, run) / name))
        elif kind == "OTHERS":
            others = other_runs(name).items()
            words += [f"{label}={run_folder(training_of(args, other))}" for label, other in others]
        else:
            words.append(word)
    return words


def make(args: Args, run: Run) -> None:
    for number, command in enumerate(commands_of(args, run)):
        folder = folder_of(args, run) / str(number)
        done = folder.with_suffix(".seconds")
        if done.exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        words = words_of(args, run, command)
        begun = list(folder.glob("*/checkpoint.pt"))
        if number <= len(run.before):
            words += ["--run-dir", str(folder)]
        if number == len(run.before) and begun and run.script != GRU:  # who does not resume begins anew
            words = [run.script, "--resume", run_folder(folder)]
        start = time.perf_counter()
        with open(folder.with_suffix(".log"), "a") as file:
            subprocess.run([sys.executable, *words], cwd=ROOT, stdout=file, stderr=file, check=True)
        done.write_text(f"{time.perf_counter() - start:.1f}")


def make_all(args: Args, runs: list[Run]) -> None:
    start = time.perf_counter()
    longest_first = sorted(dict.fromkeys(runs), key=lambda run: -len(run.then))
    with concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
        jobs = {pool.submit(make, args, run): run for run in longest_first}
        for count, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            error = job.exception()
            state = "done" if error is None else f"FAILED, see its logs: {error}"
            seconds = f"{time.perf_counter() - start:.0f} s"
            name = folder_of(args, jobs[job]).name
            print(f"{seconds}, {count} of {len(jobs)}: {state}: {name}", flush=True)


# ---- docs/data, from the folders of the runs
def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def figures_of(row: dict) -> dict[str, float]:
    """What we follow, of one line of metrics.jsonl"""
    figures = {name: row[key] for name, key in FOLLOWED.items() if row.get(key) is not None}
    if "moa/nll" in row:
        figures["moa_gap"] = row["moa/nll"] - row["moa/ceiling/nll"]
    return figures


def watched_steps(flags: dict, iterations: int) -> int:
    """Env steps of rule-based games that the models of a seed have learned from after so many
    iterations. flags: those of a training script, as in args.json"""
    has_world_model = flags["imagination"] or flags.get("planner", "none") != "none"
    if not has_world_model and flags["subgoals"] == "none":
        return 0
    in_preparation = 0
    updates = flags["pretraining_updates"]
    world_model_learns = has_world_model and not flags["world_model_checkpoint"]
    if updates and (world_model_learns or not flags["vae_checkpoint"]):
        rounds = max(1, min(8, updates // 10))
        in_preparation = rounds * flags["pretraining_games"] * flags["num_steps"]
    beside = 0
    if flags["offline_ratio"]:
        rollouts = flags["replay_rollouts"] + math.ceil(iterations / flags["replay_rollouts"])
        beside = rollouts * math.ceil(flags["num_envs"] / 2) * flags["num_steps"]
    return in_preparation + beside


def count_time(args: Args, run: Run, flags: dict, lines: list[dict]) -> None:
    """Adds to each line of metrics.jsonl seconds of training, and steps and seconds since the very
    start, with those of what went before"""
    folder = folder_of(args, run)
    log = training_of(args, run).with_suffix(".log").read_text()
    ready = float((re.findall(r"ready after ([\d.]+) s", log) or [0])[0])
    steps_before = 0
    for number in range(len(run.before)):
        ready += float((folder / f"{number}.seconds").read_text())
        rows = read_lines(next((folder / str(number)).glob("*/metrics.jsonl")))
        steps_before += int(rows[-1].get("charts/env_steps", 0))
    for line in lines:
        iterations = line["steps"] // (flags["num_envs"] * flags["num_steps"])
        watched = watched_steps(flags, iterations) if run.script != GRU else 0
        line["seconds"] = line["steps"] / line["time/SPS"]
        line["all_steps"] = steps_before + watched + line["steps"]
        line["all_seconds"] = ready + line["seconds"]


def summary_of(lines: list[dict]) -> dict:
    """Of one seed's metrics.jsonl: means over the last fifth, and when returns were reached"""
    figures = [figures_of(line) for line in lines]
    last = figures[-max(1, len(figures) // 5) :]
    row = {"steps": lines[-1]["steps"]}
    for key in last[-1]:
        row[key] = np.mean([f[key] for f in last if key in f])
    fifths = np.array_split([f.get("return", 0.0) for f in figures], min(5, len(figures)))
    means = [part.mean() for part in fifths]
    row["fall"] = max(means) - means[-1]
    # Not in the first line, which may count only games that ended early
    reached = [line for line, f in zip(lines[1:], figures[1:], strict=True) if f.get("return", 0) >= 2.8]
    first = reached[0] if reached else {}
    for name in ("steps", "seconds", "all_steps", "all_seconds"):
        row[f"{name}_to_2.8"] = first.get(name, "")
    return row | {"seconds": lines[-1]["seconds"]}


def curve_of(lines: list[dict]) -> list[dict]:
    """Return over steps and over time, in up to 40 of its lines"""
    rows = []
    for k in sorted(set(np.linspace(0, len(lines) - 1, 40).astype(int))):
        row = {name: lines[k][name] for name in ("steps", "all_seconds")}
        rows.append(row | {"return": figures_of(lines[k]).get("return", "")})
    return rows


def figures_before(folder: Path) -> dict[str, float]:
    """What pretrain_vae.py found in held-out games of each seed: name -> [S]"""
    found = {}
    for path in sorted(folder.glob("*/*/evaluation/final.npz")):
        for name in ("top1", "nll"):
            found.setdefault(f"before/{name}", []).append(float(np.load(path)[f"moa/{name}"]))
    return found


def probes(folder: Path) -> dict[str, float]:
    """Of the subgoals in self-play: name -> [S]"""
    names = {"probe": "after/probe", "most frequent prey": "after/probe_majority"}
    found = {}
    for path in folder.glob("*/evaluation_learner-learner-*.csv"):
        for row in read_csv(path):
            if row["measure"] in names and row["about"] == "all steps":
                found.setdefault(names[row["measure"]], []).append(float(row["value"]))
    return found


def adaptations(folder: Path) -> dict[str, list[dict]]:
    """What adapt.py says: means over the repetitions of each seed; returns beside the hardest team"""
    scores, hardest = {}, []
    for sets in tables.SETS:
        for path in folder.glob(f"*/adaptation_{sets}.csv"):
            for row in read_csv(path):
                by_repetition = row["mode"] == tables.BAYES  # nobody trained it
                seed = row["repetition"] if by_repetition else row["seed"]
                place = sets, row["co_players"], row["mode"], seed
                scores.setdefault(place, []).append(float(row["score"]))
                if row["co_players"] == HARDEST and row["mode"] == "learning":
                    hardest.append({name: x for name, x in row.items() if name.startswith("return at")})
    names = ("sets", "co_players", "mode", "seed")
    rows = [dict(zip(names, place, strict=True)) | {"score": np.mean(x)} for place, x in scores.items()]
    curve = []
    for name in hardest[0] if hardest else ():
        mean = np.mean([float(row[name]) for row in hardest])
        curve.append({"learner": "learning", "steps": name.split()[-1], "return": mean})
    return {"_adaptation": rows, "_adaptation_curves": curve}


def tables_of(args: Args, run: Run, number: str) -> dict[str, list[dict]]:
    """name of a table -> its rows of one run"""
    folder = training_of(args, run)
    found = {"": [], "_curves": [], "_together": []}
    of_seeds = figures_before(folder_of(args, run)) | probes(folder)
    for seed, path in enumerate(sorted(folder.glob("*/metrics.jsonl"))):
        lines = read_lines(path)
        flags = json.loads((path.parent / "args.json").read_text())
        count_time(args, run, flags, lines)
        row = {"seed": seed, "device": flags["device"], "flags": f"{run.script} {run.flags}"}
        row |= summary_of(lines) | {name: values[seed] for name, values in of_seeds.items()}
        found[""].append(row)
        if number == "time":
            found["_curves"] += [{"seed": seed, **row} for row in curve_of(lines)]
    if number == "moa":
        rows = [row for path in sorted(folder.glob("*/evaluation_*.csv")) for row in read_csv(path)]
        found["_evaluation"] = [row for row in rows if row["measure"].startswith(MOA_MEASURES)]
    for path in folder.glob("*/partners*.csv"):
        population = path.stem.removeprefix("partners").lstrip("_")
        found["_together"] += [{"population": population, **row} for row in read_csv(path)]
    return found | adaptations(folder)


def collect(args: Args, number: str) -> None:
    """docs/data/section_NUMBER*.csv from the folders of the runs"""
    section = SECTIONS[number]
    labels = list(section.runs)
    found = {}
    for label, run in section.runs.items():
        if is_trained(args, run):
            for name, rows in tables_of(args, run, number).items():
                found.setdefault(name, []).extend({"run": label, **row} for row in rows)
    for name, rows in found.items():
        fresh = {row["run"] for row in rows}
        # What ran elsewhere stays.
        elsewhere = [row for row in read(Path(args.docs), number, name) if row["run"] not in fresh]
        rows = [row for row in rows + elsewhere if row["run"] in labels]
        rows.sort(key=lambda row: labels.index(row["run"]))
        if rows:
            write(Path(args.docs) / "data" / f"section_{number}{name}.csv", rows)


# ---- Command line
def main(args: Args) -> None:
    unknown = [number for number in args.section if number not in SECTIONS]
    if unknown:
        sys.exit(f"error: there is no section {unknown[0]}: {', '.join(SECTIONS)}")
    for number in args.section:
        runs = SECTIONS[number].runs
        if args.list:
            print(f"{number}. {SECTIONS[number].title}")
            for label, run in runs.items():
                print(f"     {label}:", "\n         ".join(commands_of(args, run)))
        elif not args.draw:
            make_all(args, list(runs.values()))
            collect(args, number)
    if args.list:
        return
    for number in args.section:
        tables.draw(Path(args.docs), number)


if __name__ == "__main__":
    main(tyro.cli(Args))
