"""Tables of a section, from docs/data alone."""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.results import (
    BAYES,
    GAMES,
    by_run,
    interval,
    labels_in,
    mean_of_games,
    mean_returns,
    plus_minus,
    print_table,
    read,
    read_csv,
    references,
)
from benchmarks.sections import BOARDS, DOSES, SEARCH_LABEL, SECTIONS, TIMED_STEPS, board_of, dose_label, label_of
from benchmarks.worst_case import CO_PLAYER_SETS, draw_worst

MOA_COLUMNS = ("NLL", "NLL ceiling", "NLL Bayes", "top-1", "top-1 ceiling", "top-1 Bayes")
ACTION_COLUMNS = ("recall", "recall ceiling", "precision", "precision ceiling")
PRINTED_BESIDE = {  # column: another one beside it
    "after/probe": "after/probe_majority",
}


def print_moa(docs: Path, number: str) -> None:
    """A row for each kind of co-player and run"""
    rows = read(docs, number, "_moa")
    table = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for run in labels_in(rows):
            of_kind = [row for row in rows if row["run"] == run and row["kind"] == kind]
            if not of_kind:
                continue
            cells = []
            for key in MOA_COLUMNS:
                of_seeds = interval([float(row[key]) for row in of_kind])
                cells.append(plus_minus(of_seeds))
            above = interval([float(row["NLL"]) - float(row["NLL ceiling"]) for row in of_kind])
            table.append([kind, run, str(len(of_kind)), *cells, plus_minus(above)])
    if table:
        print_table(["co-player", "run", "seeds", *MOA_COLUMNS, "NLL above the ceiling"], table)


def print_moa_actions(docs: Path, number: str) -> None:
    table = []
    for row in read(docs, number, "_moa_actions"):
        if int(row["times"]) > 0:
            figures = [f"{float(row[key]):.3f}".replace("nan", "-") for key in ACTION_COLUMNS]
            table.append([row["kind"], row["run"], row["action"], row["times"], *figures])
    if table:
        print_table(["co-player", "run", "action", "times", *ACTION_COLUMNS], table)


def returns_until(rows: list[dict], run: str, clock: str, limit: float) -> list[float]:
    """Return of each seed in its last line before `limit`; clock: steps or all_seconds"""
    returns = {}
    for row in rows:
        if row["run"] == run and row.get("return") and float(row[clock]) <= limit:
            returns[row["seed"]] = float(row["return"])
    return list(returns.values())


def time_row(rows: list[dict], run: str, steps: int, seconds: float) -> list[str]:
    """Returns after `steps` and after `seconds`, and how long the run took"""
    after_steps = returns_until(rows, run, "steps", steps)
    after_time = returns_until(rows, run, "all_seconds", seconds)
    whole = max(float(row["all_seconds"]) for row in rows if row["run"] == run)
    cell = "not ready"
    if after_time:
        cell = plus_minus(interval(after_time))
    if whole < seconds:
        cell += ", ended"
    return [run, plus_minus(interval(after_steps)), cell, f"{whole:.0f}"]


def print_time(docs: Path, number: str) -> None:
    """After equal steps, and after the time that the search takes for these; ms a decision"""
    rows = read(docs, number, "_curves")
    searched = [float(row["all_seconds"]) for row in rows if row["run"] == SEARCH_LABEL]
    if not searched:  # --only others
        return
    path = docs / "data" / "decisions_gpu.csv"
    decisions = read_csv(path) if path.exists() else []
    sizes = list(dict.fromkeys(row["games"] for row in decisions))
    milliseconds = {}
    for row in decisions:
        milliseconds[row["run"], row["games"]] = f"{float(row['milliseconds']):.3g}"
    seconds = max(searched)
    table = []
    for run in labels_in(rows):
        of_decisions = [milliseconds.get((run, games), "") for games in sizes]
        table.append([*time_row(rows, run, TIMED_STEPS, seconds), *of_decisions])
    header = [
        "run",
        f"return after {TIMED_STEPS} steps",
        f"after {seconds:.0f} s",
        "seconds of the whole run",
    ]
    header += [f"ms a decision, {games} game(s)" for games in sizes]
    print_table(header, table)


def print_together(docs: Path, number: str) -> None:
    """What is earned in the first games with a partner and later on, and with subgoals of other games: with the
    partners of the training, then with each that nobody met"""
    rows = read(docs, number, "_together")
    for population in dict.fromkeys(row["population"] for row in rows):
        of_partner = [row for row in rows if row["population"] == population]
        table = []
        for run in labels_in(of_partner):
            cells = [plus_minus(mean_of_games(of_partner, run, "return", games)) for games in GAMES.values()]
            shuffled = mean_of_games(of_partner, run, "shuffled", GAMES["games 11-20"])
            table.append([run, *cells, plus_minus(shuffled)])
        partner = f" beside {population}" if population else ""
        print_table([f"arm, frozen{partner}", *GAMES, "shuffled, 11-20"], table)


DOSE_COLUMNS = {  # what is said about a dose: key
    "return": "return",
    "steps to 2.8": "steps_to_2.8",
    "real samples": "real_samples",
    "imagined samples": "imagined_samples",
}


def print_doses(rows: list[dict], flag: str) -> None:
    table = []
    for board in BOARDS:
        for value in DOSES[flag]:
            label = dose_label(flag, value, board)
            count = sum(row["run"] == label for row in rows)
            if count:
                keys = DOSE_COLUMNS.values()
                cells = [cell_of(by_run(rows, key).get(label, []), count, key) for key in keys]
                table.append([value, board, *cells])
    print_table([f"--{flag}", "board", *DOSE_COLUMNS], table)


def normalised(rows: list[dict], of_references: dict, sets: str) -> dict[str, dict[str, float]]:
    """run and mode -> co-players -> score; random 0, best response 1 (of the run that measured them on this board, as
    the Bayes hunter)"""
    scores = {}
    for row in rows:
        if row["sets"] != sets:
            continue
        board = board_of(row["run"])
        low, high = of_references.get((board, row["co_players"]), (math.nan, math.nan))
        for mode in (BAYES, "frozen", "learning"):
            if row.get(f"{mode} mean"):
                label = label_of(BAYES, board) if mode == BAYES else f"{row['run']}, {mode}"
                score = (float(row[f"{mode} mean"]) - low) / (high - low)
                scores.setdefault(label, {})[row["co_players"]] = score
    return scores


def compared() -> list[tuple[str, str, str, str]]:
    """run, mode of evaluation/adapt.py, and from which run's and mode's return it differs"""
    pairs = []
    for board in BOARDS:
        hopplus = label_of("HOP+", board)
        for method in ("PPO, mixed", "GRU, mixed", "+ subgoals, mixed"):
            pairs.append((hopplus, "learning", label_of(method, board), "learning"))
        pairs.append((hopplus, "learning", hopplus, "frozen"))
    for without in ("no memory", "policy without subgoals"):
        for mode in ("frozen", "learning"):
            pairs.append(("HOP+", mode, f"HOP+, {without}", mode))
    return pairs


def print_differences(docs: Path, number: str) -> None:
    """What one learner earns more than another beside the same players, seed by seed"""
    rows = read(docs, number, "_adaptation_repetitions")
    for run, mode, base, base_mode in compared():
        of_base = mean_returns(rows, base, base_mode)
        texts = []
        for players, returns in mean_returns(rows, run, mode).items():
            seeds = returns.keys() & of_base.get(players, {}).keys()
            if seeds:
                difference = interval([returns[seed] - of_base[players][seed] for seed in seeds])
                texts.append(f"{players} {plus_minus(difference)}")
        if texts:
            print(f"{run} {mode} minus {base} {base_mode}: " + ", ".join(texts))


# ---- A section


def cell_of(values: list[float], count: int, key: str) -> str:
    """Mean and interval of one run; `count`: its seeds"""
    if not values:
        return "never" if "_to_" in key else ""
    mean, low, high = interval(values)
    text = f"{mean:.4g} [{low:.4g}, {high:.4g}]"
    return text if len(values) == count else f"{text} ({len(values)} of {count} seeds)"


def print_section(docs: Path, number: str, rows: list[dict], scores: dict) -> None:
    keys = ["return"]
    for key in SECTIONS[number].columns:
        keys.append(key)
        if key in PRINTED_BESIDE:
            keys.append(PRINTED_BESIDE[key])
    table = []
    for run in labels_in(rows):
        count = sum(row["run"] == run for row in rows)
        cells = [cell_of(by_run(rows, key).get(run, []), count, key) for key in keys]
        table.append([run, str(count), *cells])
    print(f"\n## {number}. {SECTIONS[number].title}")
    print_table(["run", "seeds", *keys], table)
    print_together(docs, number)
    if number == "dose":
        for flag in DOSES:
            print_doses(rows, flag)
    if number == "time":
        print_time(docs, number)
    print_moa(docs, number)
    print_moa_actions(docs, number)
    for of_runs in scores.values():
        for run, of_sets in of_runs.items():
            texts = [f"{players} {value:.3f}" for players, value in of_sets.items()]
            print(f"{run}: {', '.join(texts)}")
    print_differences(docs, number)


def draw(docs: Path, number: str) -> None:
    if number == "worst":
        draw_worst(docs)
        return
    rows = read(docs, number)
    if not rows:
        print(f"section {number}: no data yet")
        return
    met = read(docs, number, "_adaptation")
    of_references = references(docs, SECTIONS[number].references)
    scores = {sets: normalised(met, of_references, sets) for sets in CO_PLAYER_SETS}
    print_section(docs, number, rows, scores)
