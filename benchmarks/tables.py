"""Tables and figures of experiments.py, from docs/data alone."""

import csv
import itertools
import math
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.sections import BOARDS, METHODS, OMG, SECTIONS, label_of, split_label
from evaluation.runs import interval

import numpy as np

STYLE = Path(__file__).resolve().parent / "plots.mplstyle"
COLOURS = {
    "PPO": "C0",
    "PPO, mixed": "C5",
    OMG: "C3",
    "HOP+": "C4",
    "HOP": "C6",
    "GRU": "C2",
    "LIAM": "C1",
}
FORMS = {  # column: its heading, factor, digits
    "return": ("return", 1, 3),
    "steps_to_2.8": ("million steps to return 2.8", 1e-6, 3),
    "watched_to_2.8": ("million steps watched by then", 1e-6, 2),
    "seconds_to_2.8": ("seconds to return 2.8", 1, 1),
    "moa_gap": ("MOA's cross-entropy above the lowest possible", 1, 3),
    "shuffled": ("subgoals of another game", 1, 3),
}
MOA_COLUMNS = {
    "NLL": "cross-entropy of MOA",
    "NLL Bayes": "cross-entropy of Bayes' rule",
    "NLL its own": "lowest possible cross-entropy",
    "top-1": "top-1 of MOA",
    "top-1 Bayes": "top-1 of Bayes' rule",
    "top-1 its own": "highest possible top-1",
}
BAYES = "Bayes hunter"
HARDEST = "3 waiting"  # beside them most learners earn least, so there is a column without them
SETS = ("standard", "strangers", "learned")  # of evaluation/adapt.py


# ---- Files and numbers
def read_csv(path: Path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def read(docs: Path, name: str) -> list[dict]:
    path = docs / "data" / f"{name}.csv"
    return read_csv(path) if path.exists() else []


def plus_minus(values, digits: int = 3) -> str:
    """Mean and 95 % interval, if it does not round to 0, of values or of (mean, half width)"""
    mean, half = values if isinstance(values, tuple) else interval(values)
    text = f"{half:.{digits}f}"
    known = text != "nan" and float(text) > 0
    return f"{mean:.{digits}f} ± {text}" if known else f"{mean:.{digits}f}"


def labels_in(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(row["run"] for row in rows))


def print_table(header: list[str], rows: list[list[str]]) -> None:
    print(f"\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


# ---- Runs
def cell_of(rows: list[dict], run: str, key: str) -> str:
    """Mean and interval over seeds. A seed may have no number yet (""), or "never" reach 2.8"""
    known = [row[key] for row in rows if row["run"] == run and row.get(key)]
    if not known:
        return ""
    _, factor, digits = FORMS.get(key, ("", 1, 3))
    values = [factor * float(x) for x in known if x != "never"]
    if not values:
        return "never"
    text = plus_minus(values, digits)
    return text if len(values) == len(known) else f"{text} ({len(values)} of {len(known)} seeds)"


def print_runs(docs: Path, name: str) -> None:
    """A row for each run; boards side by side"""
    rows = read(docs, name)
    places = [split_label(label) for label in labels_in(rows)]
    boards = sorted({board for _, board in places})
    columns = [(b, key) for b in boards for key in SECTIONS[name].columns if any(row.get(key) for row in rows)]
    header = [""]
    for board, key in columns:
        heading = FORMS.get(key, (key,))[0]
        header.append(heading if len(boards) == 1 else f"{board}: {heading}")
    milliseconds = {}
    if name == "search":
        milliseconds = {row["case"]: f"{float(row['milliseconds']):.3g}" for row in read(docs, "decisions_gpu")}
    sizes = list(dict.fromkeys(case.rpartition(", ")[2] for case in milliseconds))
    header += [f"ms per decision, {size}" for size in sizes]
    table = []
    for label in dict.fromkeys(label for label, _ in places):
        cells = [cell_of(rows, label_of(label, board), key) for board, key in columns]
        table.append([label, *cells, *(milliseconds.get(f"{label}, {size}", "") for size in sizes)])
    print_table(header, table)


def print_moa(docs: Path) -> None:
    """A row for each kind of co-player and run"""
    found = {}  # kind, run -> measure -> value of each seed
    for row in read(docs, "moa_kinds"):
        of_kind = found.setdefault((row["about"], row["run"]), {})
        of_kind.setdefault(row["measure"], []).append(float(row["value"]))
    table = []
    for (kind, run), of_kind in sorted(found.items()):
        table.append([f"{kind}, {run}", *(plus_minus(of_kind[name]) for name in MOA_COLUMNS)])
    print_table(["", *MOA_COLUMNS.values()], table)


# ---- The worst case
Returns = dict[str, dict[str, float]]  # co-players -> seed -> return


class WorstCase(NamedTuple):
    team: str
    score: tuple[float, float]  # mean, half width
    mean: tuple[float, float]


def read_meetings(rows: list[dict]) -> dict[tuple[str, str], Returns]:
    """run, mode -> Returns. Nobody trained the Bayes hunter: it has repetitions for seeds"""
    meetings = {}
    for row in rows:
        of_run = meetings.setdefault((row["run"], row["mode"]), {})
        of_run.setdefault(row["co_players"], {})[row["seed"]] = float(row["score"])
    return meetings


def references(rows: list[dict]) -> dict[tuple[str, str], tuple[float, float]]:
    """board, co-players -> what a random player and a best response earn"""
    found = {}
    for row in rows:
        place = split_label(row["run"])[1], row["co_players"]
        found.setdefault(place, {})[row["mode"]] = float(row["score"])
    pairs = {place: (of_set.get("random"), of_set.get("best response")) for place, of_set in found.items()}
    return {place: pair for place, pair in pairs.items() if None not in pair}


def complete_scores(rows: list[dict]) -> dict[tuple[str, str, str], Returns]:
    """board, method, mode -> (return - random) / (best response - random), of those who met all teams
    with references; a worst of fewer would not compare"""
    scale = references(rows)
    meetings = read_meetings(rows)
    found = {}
    for board, method, mode in itertools.product(BOARDS, METHODS["4x4"], (BAYES, "frozen", "learning")):
        returns = meetings.get((label_of(method, board), mode), {})
        scores = {}
        for place, players in scale:
            if place == board and players in returns:
                low, high = scale[board, players]
                scores[players] = {seed: (x - low) / (high - low) for seed, x in returns[players].items()}
        if scores and len(scores) == sum(place == board for place, _ in scale):
            found[board, BAYES if mode == BAYES else method, mode] = scores
    return found


def worst_case(scores: Returns) -> WorstCase:
    """The worst team is the one with the lowest mean over seeds: the lowest of each seed's scores would
    be lower by their noise alone. Its interval is that of this team. The mean is first over teams, then
    over the seeds that met all of them."""
    of_teams = {team: interval(list(of_seeds.values())) for team, of_seeds in scores.items()}
    team = min(of_teams, key=lambda team: of_teams[team][0])
    seeds = set.intersection(*(set(of_seeds) for of_seeds in scores.values()))
    means = [np.mean([of_seeds[seed] for of_seeds in scores.values()]) for seed in sorted(seeds)]
    return WorstCase(team, of_teams[team], interval(means))


def print_worst(found: dict) -> None:
    boards = list(dict.fromkeys(board for board, _, _ in found))
    header = [""]
    rows = {}
    columns = ["worst score", "worst team", "mean score"]
    if any(HARDEST in scores for scores in found.values()):
        columns.append(f"worst score without {HARDEST}")
    for board in boards:
        header += [f"{board}: {column}" for column in columns]
    for (_, method, mode), scores in sorted(found.items(), key=lambda item: item[0][2]):
        worst = worst_case(scores)
        cells = [plus_minus(worst.score, 2), worst.team, plus_minus(worst.mean, 2)]
        if HARDEST in scores:
            rest = worst_case({team: x for team, x in scores.items() if team != HARDEST})
            cells.append(plus_minus(rest.score, 2))
        rows.setdefault(method if mode == BAYES else f"{method}, {mode}", []).extend(cells)
    print_table(header, [[label, *cells] for label, cells in rows.items()])


# ---- Figures
def pyplot():
    import matplotlib
    import matplotlib.style

    matplotlib.use("Agg")
    matplotlib.style.use(STYLE)
    import matplotlib.pyplot as plt

    return plt


def save(docs: Path, figure, name: str) -> None:
    """With 256 colours, which takes a third of the bytes"""
    from PIL import Image

    path = docs / "results" / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", dpi=110)
    pyplot().close(figure)
    with Image.open(path) as image:
        few_colours = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
    few_colours.save(path, optimize=True)


def draw_worst(docs: Path, rows: list[dict], found: dict) -> None:
    """docs/results/worst_case.png: a map of methods x teams, for who learns and the scripted hunter"""
    sets_of = {row["co_players"]: row["sets"] for row in rows}
    boards = list(dict.fromkeys(board for board, _, _ in found))
    size = (10.4, 3.4 * len(boards))
    figure, axes = pyplot().subplots(len(boards), 1, figsize=size, squeeze=False, layout="constrained")
    for axis, board in zip(axes[:, 0], boards, strict=True):
        names, shares = [], []
        for (place, method, mode), scores in found.items():
            if place != board or mode == "frozen":
                continue
            teams = []  # a gap with its name before each kind of teams
            for sets in SETS:
                teams += [f"{sets.upper()}:"] + [players for players in scores if sets_of[players] == sets]
            means = [np.mean(list(scores.get(team, {0: math.nan}).values())) for team in teams]
            names.append(method)
            shares.append([*means, math.nan, worst_case(scores).score[0]])
        axis.imshow(shares, cmap="RdYlBu", vmin=0, vmax=1, aspect="auto")  # red: as a random player
        for (row, column), score in np.ndenumerate(shares):
            colour = "white" if score < 0.12 or score > 0.84 else "black"
            text = "" if math.isnan(score) else f"{score:.2f}".replace("0.", ".", 1)
            axis.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
        axis.set_yticks(range(len(names)), names)
        ticks = [*teams, "", "worst score"] if board == boards[-1] else []
        axis.set_xticks(range(len(ticks)), ticks, rotation=38, ha="right", fontsize=9)
        axis.set_title(f"{board}: score in each of {len(found[place, method, mode])} teams", loc="left")
        axis.grid(visible=False)
    save(docs, figure, "worst_case")


def draw_curves(docs: Path, name: str, picture: str, clock: str, title: str, xlabel: str) -> None:
    """docs/results/PICTURE.png: return over the clock, a line for each method, boards side by side"""
    rows = read(docs, f"{name}_curves")
    figure, axes = pyplot().subplots(1, len(BOARDS), figsize=(9, 3.2))
    for axis, board in zip(axes, BOARDS, strict=True):
        for label in labels_in(rows):
            method, place = split_label(label)
            points = [(float(row[clock]), float(row["return"])) for row in rows if row["run"] == label]
            colour = COLOURS.get(method) or COLOURS[method.removesuffix(", mixed")]
            if place == board:
                axis.plot(*zip(*points, strict=True), label=method, color=colour)
        axis.set(title=f"{board}: {title}", xlabel=xlabel)
    axes[-1].legend(*axes[0].get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    save(docs, figure, picture)


# ---- A section
def draw(docs: Path, name: str) -> None:
    print(f"\n## {name}: {SECTIONS[name].title}")
    if name == "worst":
        rows = read(docs, "worst_teams")
        found = complete_scores(rows)
        print_worst(found)
        draw_worst(docs, rows, found)
        title = "return beside three who wait"
        draw_curves(docs, "worst", "three_waiting", "steps", title, "env steps with them")
    elif name == "unseen":
        print_worst(complete_scores(read(docs, "unseen_teams")))
    elif name == "moa":
        print_moa(docs)
    elif SECTIONS[name].columns:
        print_runs(docs, name)
    if name == "partners":
        draw_curves(docs, "partners", "partners", "game", "return beside a partner that stays", "number of the game")
