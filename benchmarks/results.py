"""docs/data and docs/results: reading, writing, and the statistics of tables."""

import csv
import functools
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.sections import board_of

import numpy as np
from scipy import stats


def read_csv(path: Path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def read(docs: Path, number: str, name: str = "") -> list[dict]:
    path = docs / "data" / f"section_{number}{name}.csv"
    return read_csv(path) if path.exists() else []


Interval = tuple[float, float, float]


@functools.cache
def t_quantile(degrees: int) -> float:
    return float(stats.t.ppf(0.975, degrees))


def interval(values: list[float]) -> Interval:
    """mean and its 95 % interval (Student's t)"""
    values = np.asarray(values, np.float64)
    half = math.nan
    if len(values) > 1:
        half = t_quantile(len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    mean = values.mean()
    return float(mean), float(mean - half), float(mean + half)


def plus_minus(of_mean: Interval | None, digits: int = 3) -> str:
    if of_mean is None:
        return ""
    mean, _, high = of_mean
    if math.isnan(high):  # one seed, or always the same
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {high - mean:.{digits}f}"


def by_run(rows: list[dict], key: str) -> dict[str, list[float]]:
    values = {}
    for row in rows:
        values.setdefault(row["run"], [])
        if row.get(key):
            values[row["run"]].append(float(row[key]))
    return {run: numbers for run, numbers in values.items() if numbers}


def labels_in(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(row["run"] for row in rows))


def in_three_signs(value: float) -> str:
    """For a small cell: .86, 1.0, -2.4"""
    if -1 < value < 0.995:
        return f"{value:.2f}".replace("0.", ".", 1)
    return f"{value:.1f}"


def print_table(header: list[str], rows: list[list[str]]) -> None:
    print(f"\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def save(docs: Path, figure, name: str, **options) -> None:
    """With 256 colours, which takes a third of the bytes"""
    import matplotlib.pyplot as plt
    from PIL import Image

    path = docs / "results" / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", **options)
    plt.close(figure)
    with Image.open(path) as image:
        few_colours = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
    few_colours.save(path, optimize=True)


def mean_of_games(rows: list[dict], run: str, key: str, games: range) -> Interval | None:
    """Of some games together, over seeds"""
    of_seeds = {}
    for row in rows:
        if row["run"] == run and int(row["game"]) in games and row.get(key):
            of_seeds.setdefault(row["seed"], []).append(float(row[key]))
    return interval([np.mean(values) for values in of_seeds.values()]) if of_seeds else None


GAMES = {
    "game 1": range(1, 2),
    "game 2": range(2, 3),
    "games 2-20": range(2, 21),
    "games 3-20": range(3, 21),
    "games 11-20": range(11, 21),
}
BAYES = "Bayes hunter"


def references(docs: Path, numbers: tuple[str, ...] = ("7", "8")) -> dict[tuple[str, str], tuple[float, float]]:
    """board, co-players -> what a random player and a best response earn, from these sections"""
    rows = [row for number in numbers for row in read(docs, number, "_adaptation")]
    return reference_returns(rows)


def reference_returns(rows: list[dict]) -> dict[tuple[str, str], tuple[float, float]]:
    returns = {}
    for row in rows:
        if row.get("best response mean"):
            place = board_of(row["run"]), row["co_players"]
            returns[place] = float(row["random mean"]), float(row["best response mean"])
    return returns


def mean_returns(rows: list[dict], run: str, mode: str) -> dict[str, dict[str, float]]:
    """co-players -> seed -> return in all its repetitions"""
    returns = {}
    for row in rows:
        if row["run"] == run and row.get(mode):
            of_set = returns.setdefault(row["co_players"], {})
            of_set.setdefault(row["seed"], []).append(float(row[mode]))
    return {
        players: {seed: float(np.mean(values)) for seed, values in of_set.items()}
        for players, of_set in returns.items()
    }
