"""Tables and figures of experiments.py, from docs/data alone."""

import csv
import itertools
import math
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.sections import BOARDS, METHODS, SECTIONS, TIMED_STEPS, board_of, label_of
from evaluation.runs import interval

import numpy as np

STYLE = Path(__file__).resolve().parent / "plots.mplstyle"
BAYES = "Bayes hunter"
HARDEST = "3 waiting"  # beside them most learners earn least, so there is a table without them
SETS = ("standard", "strangers", "learned")  # of evaluation/adapt.py


# ---- Files and numbers
def read_csv(path: Path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def read(docs: Path, number: str, name: str = "") -> list[dict]:
    path = docs / "data" / f"section_{number}{name}.csv"
    return read_csv(path) if path.exists() else []


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def plus_minus(values, digits: int = 3) -> str:
    """Mean and 95 % interval of values, or of (mean, half width)"""
    mean, half = values if isinstance(values, tuple) else interval(values)
    text = f"{mean:.{digits}f}".replace("nan", "")
    return text if math.isnan(half) else f"{text} ± {half:.{digits}f}"


def values_of(rows: list[dict], run: str, key: str) -> list[float]:
    return [float(row[key]) for row in rows if row["run"] == run and row.get(key)]


def labels_in(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(row["run"] for row in rows))


def print_table(header: list[str], rows: list[list[str]]) -> None:
    if rows:
        print(f"\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
        for row in rows:
            print(f"| {' | '.join(row)} |")


# ---- Runs
def cell_of(values: list[float], count: int, key: str) -> str:
    """Mean and interval of one run; `count`: its seeds"""
    if not values:
        return "never" if "_to_" in key else ""
    mean, half = interval(values)
    text = f"{mean:.4g} [{mean - half:.4g}, {mean + half:.4g}]"
    return text if len(values) == count else f"{text} ({len(values)} of {count} seeds)"


def print_runs(rows: list[dict], keys: list[str]) -> None:
    table = []
    for run in labels_in(rows):
        count = sum(row["run"] == run for row in rows)
        cells = [cell_of(values_of(rows, run, key), count, key) for key in keys]
        table.append([run, str(count), *cells])
    print_table(["run", "seeds", *keys], table)


def returns_until(rows: list[dict], run: str, clock: str, limit: float) -> list[float]:
    """Return of each seed in its last line before `limit`; clock: steps or all_seconds"""
    returns = {}
    for row in rows:
        if row["run"] == run and row.get("return") and float(row[clock]) <= limit:
            returns[row["seed"]] = float(row["return"])
    return list(returns.values())


def print_time(docs: Path, rows: list[dict]) -> None:
    """After equal steps, and after the time that search takes for these; ms a decision"""
    searched = values_of(rows, "search", "all_seconds")
    if not searched:  # --only others
        return
    path = docs / "data" / "decisions_gpu.csv"
    decisions = read_csv(path) if path.exists() else []
    milliseconds = {row["case"]: f"{float(row['milliseconds']):.3g}" for row in decisions}
    sizes = list(dict.fromkeys(case.rpartition(", ")[2] for case in milliseconds))
    seconds = max(searched)
    table = []
    for run in labels_in(rows):
        after_time = returns_until(rows, run, "all_seconds", seconds)
        whole = max(values_of(rows, run, "all_seconds"))
        cell = plus_minus(after_time) if after_time else "not ready"
        cell += ", ended" if whole < seconds else ""
        after_steps = plus_minus(returns_until(rows, run, "steps", TIMED_STEPS))
        table.append([run, after_steps, cell, f"{whole:.0f}"])
        table[-1] += [milliseconds.get(f"{run}, {size}", "") for size in sizes]
    header = ["run", f"return after {TIMED_STEPS} steps", f"after {seconds:.0f} s", "seconds of the whole run"]
    print_table(header + [f"ms a decision, {size}" for size in sizes], table)


# ---- What follows runs: partners, MOA
GAMES = {
    "game 1": range(1, 2),
    "game 2": range(2, 3),
    "games 2-20": range(2, 21),
    "games 3-20": range(3, 21),
    "games 11-20": range(11, 21),
}


def mean_of_games(rows: list[dict], run: str, key: str, games: range) -> str:
    """Of some games together, over seeds"""
    of_seeds = {}
    for row in rows:
        if row["run"] == run and int(row["game"]) in games and row.get(key):
            of_seeds.setdefault(row["seed"], []).append(float(row[key]))
    return plus_minus([np.mean(values) for values in of_seeds.values()]) if of_seeds else ""


def print_together(rows: list[dict]) -> None:
    """What is earned in the first games with a partner and later on, and with subgoals of other
    games: with the partners of the training, then with each that nobody met"""
    for population in dict.fromkeys(row["population"] for row in rows):
        met = [row for row in rows if row["population"] == population]
        table = []
        for run in labels_in(met):
            cells = [mean_of_games(met, run, "return", games) for games in GAMES.values()]
            table.append([run, *cells, mean_of_games(met, run, "shuffled", GAMES["games 11-20"])])
        partner = f" beside {population}" if population else ""
        print_table([f"arm, frozen{partner}", *GAMES, "shuffled, 11-20"], table)


MOA_COLUMNS = ("NLL", "NLL its own", "NLL Bayes", "top-1", "top-1 its own", "top-1 Bayes")


def print_moa(rows: list[dict]) -> None:
    """A row for each kind of co-player and run"""
    found = {}  # kind, run -> measure -> value of each seed
    for row in rows:
        of_kind = found.setdefault((row["about"], row["run"]), {})
        of_kind.setdefault(row["measure"], []).append(float(row["value"]))
    table = []
    for (kind, run), of_kind in found.items():
        above = np.subtract(of_kind["NLL"], of_kind["NLL its own"])
        cells = [plus_minus(of_kind[name]) for name in MOA_COLUMNS]
        table.append([kind, run, str(len(above)), *cells, plus_minus(above)])
    print_table(["co-player", "run", "seeds", *MOA_COLUMNS, "NLL above its own"], table)


# ---- Meetings with others, by evaluation/adapt.py
Returns = dict[str, dict[str, float]]  # co-players -> seed -> return


def read_meetings(rows: list[dict]) -> dict[tuple[str, str], Returns]:
    """run, mode -> Returns. Nobody trained the Bayes hunter: it has repetitions for seeds"""
    meetings = {}
    for row in rows:
        run = label_of(BAYES, board_of(row["run"])) if row["mode"] == BAYES else row["run"]
        of_set = meetings.setdefault((run, row["mode"]), {}).setdefault(row["co_players"], {})
        of_set[row["seed"]] = float(row["score"])
    return meetings


def references(rows: list[dict]) -> dict[tuple[str, str], tuple[float, float]]:
    """board, co-players -> what a random player and a best response earn"""
    found = {}
    for row in rows:
        place = board_of(row["run"]), row["co_players"]
        found.setdefault(place, {})[row["mode"]] = float(row["score"])
    pairs = {place: (of_set.get("random"), of_set.get("best response")) for place, of_set in found.items()}
    return {place: pair for place, pair in pairs.items() if None not in pair}


def print_meetings(docs: Path, number: str) -> None:
    """Returns; in brackets scores, from a random player (0) to a best response (1)"""
    rows = read(docs, number, "_adaptation")
    scale = references(rows) or references(read(docs, "7", "_adaptation"))
    halves = {(row["run"], row["mode"], row["co_players"]): row.get("half_width_95") for row in rows}
    for sets in SETS:
        meetings = read_meetings([row for row in rows if row["sets"] == sets])
        names = list(dict.fromkeys(name for of_run in meetings.values() for name in of_run))
        table = []
        for (run, mode), of_sets in meetings.items():
            cells = []
            for name in names:
                mean, half = interval(list(of_sets.get(name, {}).values()) or [math.nan])
                low, high = scale.get((board_of(run), name), (math.nan, math.nan))
                cell = plus_minus((mean, float(halves.get((run, mode, name)) or half)), 2)
                score = (mean - low) / (high - low)
                cells.append(cell if math.isnan(score) else f"{cell} ({score:.3f})")
            table.append([run if mode == BAYES else f"{run}, {mode}", *cells])
        print_table([f"return beside {sets}", *names], table)


# ---- The worst case
class WorstCase(NamedTuple):
    worst_set: str
    worst_score: tuple[float, float]  # mean, half width
    mean_score: tuple[float, float]
    regret_set: str
    worst_regret: tuple[float, float]


def scores_of(returns: Returns, board: str, scale: dict) -> Returns:
    """(return - random) / (best response - random)"""
    scores = {}
    for players, of_seeds in returns.items():
        low, high = scale[board, players]
        scores[players] = {seed: (value - low) / (high - low) for seed, value in of_seeds.items()}
    return scores


def worst_case(returns: Returns, board: str, scale: dict) -> WorstCase:
    """The worst set is the one with the lowest mean over seeds: the lowest of each seed's scores would
    be lower by their noise alone. Its interval is that of this set. The mean is first over sets, then
    over the seeds that met all of them."""
    scores = scores_of(returns, board, scale)
    of_sets = {players: interval(list(of_seeds.values())) for players, of_seeds in scores.items()}
    regrets = {}
    for players, of_seeds in returns.items():
        regrets[players] = interval([scale[board, players][1] - value for value in of_seeds.values()])
    worst_set = min(of_sets, key=lambda players: of_sets[players][0])
    regret_set = max(regrets, key=lambda players: regrets[players][0])
    seeds = set.intersection(*(set(of_seeds) for of_seeds in scores.values()))
    means = [np.mean([of_seeds[seed] for of_seeds in scores.values()]) for seed in sorted(seeds)]
    return WorstCase(worst_set, of_sets[worst_set], interval(means), regret_set, regrets[regret_set])


def complete_meetings(rows: list[dict], scale: dict) -> dict[tuple[str, str, str], Returns]:
    """board, method, mode -> Returns of those who met all sets with references; a worst of fewer would
    not compare"""
    meetings = read_meetings(rows)
    kept = {}
    for board, method, mode in itertools.product(BOARDS, [BAYES, *METHODS["4x4"]], [BAYES, "frozen", "learning"]):
        returns = meetings.get((label_of(method, board), mode), {})
        wanted = {players for place, players in scale if place == board}
        if returns and wanted <= returns.keys():
            kept[board, method, mode] = {players: x for players, x in returns.items() if players in wanted}
    return kept


def print_worst(docs: Path) -> None:
    """Tables and two figures"""
    rows = read(docs, "7", "_adaptation")
    scale = references(rows)
    meetings = complete_meetings(rows, scale)
    if not meetings:
        return
    scores = ["worst score", "beside", "mean score"]
    header = ["learner", *scores, "worst regret", "beside", *(f"without {HARDEST}: {name}" for name in scores)]
    for board in BOARDS:
        table = []
        for (place, method, mode), returns in meetings.items():
            if place != board:
                continue
            worst = worst_case(returns, board, scale)
            others = {players: x for players, x in returns.items() if players != HARDEST}
            cells = [*score_cells(worst), plus_minus(worst.worst_regret, 2), worst.regret_set]
            cells += score_cells(worst_case(others, board, scale))
            table.append([method if mode == BAYES else f"{method}, {mode}", *cells])
        number = len({players for place, players in scale if place == board})
        print(f"\n{board}, {number} sets of co-players, the last quarter of the steps")
        print_table(header, table)
    draw_worst(docs, rows, meetings, scale)
    draw_hardest(docs)


def score_cells(worst: WorstCase) -> list[str]:
    return [plus_minus(worst.worst_score, 2), worst.worst_set, plus_minus(worst.mean_score, 2)]


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


def draw_worst(docs: Path, rows: list[dict], meetings: dict, scale: dict) -> None:
    """Scores of learners that go on learning, and of the scripted hunter: a map of methods x sets"""
    plt = pyplot()
    sets_of = {row["co_players"]: row["sets"] for row in rows}
    boards = list(dict.fromkeys(board for board, _, _ in meetings))
    size = (9.6, 3.5 * len(boards))
    figure, axes = plt.subplots(len(boards), 1, figsize=size, squeeze=False, layout="constrained")
    for axis, board in zip(axes[:, 0], boards, strict=True):
        learners = {key: x for key, x in meetings.items() if key[0] == board and key[2] != "frozen"}
        names, shares = [], []
        for (_, method, _), returns in learners.items():
            ordered = []  # a gap after each kind of teams
            for sets in SETS:
                ordered += [players for players in returns if sets_of[players] == sets] + [""]
            scores = scores_of(returns, board, scale)
            means = [np.mean(list(scores.get(players, {0: math.nan}).values())) for players in ordered]
            names.append(method)
            shares.append([*means, worst_case(returns, board, scale).worst_score[0]])
        axis.imshow(shares, cmap="RdYlBu", vmin=0, vmax=1, aspect="auto")  # red: as a random player
        for (row, column), score in np.ndenumerate(shares):
            colour = "white" if score < 0.12 or score > 0.84 else "black"
            text = "" if math.isnan(score) else f"{score:.2f}".replace("0.", ".", 1)
            axis.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
        axis.set_yticks(range(len(names)), names)
        ticks = [*ordered, "worst score"] if board == boards[-1] else []
        axis.set_xticks(range(len(ticks)), ticks, rotation=38, ha="right", fontsize=9)
        axis.set_title(board, loc="left")
        axis.grid(visible=False)
    save(docs, figure, "worst_case")


def draw_hardest(docs: Path) -> None:
    """docs/results/three_waiting.png: return beside the hardest team, as learners go on learning"""
    rows = read(docs, "7", "_adaptation_curves")
    figure, axes = pyplot().subplots(1, len(BOARDS), figsize=(9, 3.2))
    for axis, board in zip(axes, BOARDS, strict=True):
        for method in METHODS[board]:
            run = label_of(method, board)
            axis.plot(values_of(rows, run, "steps"), values_of(rows, run, "return"), label=method)
        axis.set(title=f"{board}: return beside {HARDEST}, learning", xlabel="env steps with them")
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    save(docs, figure, "three_waiting")


# ---- A section
def draw(docs: Path, number: str) -> None:
    rows = read(docs, number)
    if not rows:
        print(f"section {number}: no data yet")
        return
    print(f"\n## {number}. {SECTIONS[number].title}")
    print_runs(rows, ["return", *SECTIONS[number].columns])
    print_together(read(docs, number, "_together"))
    if number == "time":
        print_time(docs, read(docs, number, "_curves"))
    print_moa(read(docs, number, "_evaluation"))
    print_meetings(docs, number)
    if number == "7":
        print_worst(docs)
