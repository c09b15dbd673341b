"""Tables and figures of a section, from docs/data alone."""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.results import (
    BAYES,
    GAMES,
    by_game,
    by_run,
    in_three_signs,
    interval,
    labels_in,
    mean_of_games,
    mean_returns,
    paired,
    plus_minus,
    print_table,
    read,
    read_csv,
    references,
    save,
)
from benchmarks.sections import (
    BOARDS,
    DOSES,
    SEARCH_LABEL,
    SECTIONS,
    TASKS,
    TIMINGS,
    board_of,
    dose_label,
    label_of,
)
from benchmarks.worst_case import CO_PLAYER_SETS, draw_worst

import numpy as np
from scipy import stats

TITLES = {  # of what is drawn
    "stag": "share of players that end with the stag",
    "nothing": "share of players that end with nothing",
    "value_real": "value loss on real samples",
    "value_real_peak": "highest in the run",
    "explained_variance": "explained variance",
    "raw_reward_outside": "share of predicted rewards outside the payoffs",
    "party_2": "share of games: two take the stag",
    "party_3": "share of games: three take the stag",
    "party_4": "share of games: four take the stag",
    "steps_to_2.8": "env steps to a return of 2.8",
    "fall": "best fifth of the run - last fifth",
    "moa_top1": "MOA, top-1",
    "moa_nll": "MOA's NLL",
    "moa_gap": "MOA's NLL above the players' own",
    "before/probe_accuracy": "pretrained: probe accuracy of g",
    "before/top1": "pretrained: MOA, top-1",
    "before/exact_match/1": "pretrained: exact after 1 step",
    "before/exact_match/20": "pretrained: exact after 20 steps",
    "all_steps_to_2.8": "all env steps to a return of 2.8",
    "all_seconds_to_2.8": "seconds from the start to a return of 2.8",
    "after/probe": "probe of subgoals: which prey?",
    "after/exact/1": "world model, exact after 1 step",
    "after/exact/20": "world model, exact after 20 steps",
}
MOA_COLUMNS = ("NLL", "NLL ceiling", "NLL Bayes", "top-1", "top-1 ceiling", "top-1 Bayes")
ACTION_COLUMNS = ("recall", "recall ceiling", "precision", "precision ceiling")
PRINTED_BESIDE = {  # what a table has beside what is drawn
    "after/probe": "after/probe_majority",
    "after/exact/1": "after/exact_own/1",
    "after/exact/20": "after/exact_own/20",
}
STYLE = Path(__file__).resolve().parent / "plots.mplstyle"
OUTSIDE = {"loc": "upper left", "bbox_to_anchor": (1, 1)}  # of a legend


# ---- Panels


def numbered(rows: list[dict]) -> dict[str, int]:
    """run -> its number in the section, so that it has the same colour in every panel"""
    return {row["run"]: row["number"] for row in rows}


def line_style(number: int) -> dict:
    """Eight colours, then the same dashed"""
    return {"color": f"C{number % 8}", "ls": "-" if number < 8 else "--"}


def heat_map(axis, table: np.ndarray) -> None:
    """Shares or scores in coloured cells, dark ones in white"""
    axis.imshow(table, vmin=0, vmax=1, aspect="auto")
    axis.grid(visible=False)
    for (y, x), value in np.ndenumerate(table):
        if not np.isnan(value):
            colour = "white" if value > 0.6 else "black"
            axis.text(x, y, in_three_signs(value), ha="center", va="center", color=colour, fontsize=8)


def scale_axis(axis, key: str, means) -> None:
    """Logarithmic where steps or losses differ much"""
    if key.startswith(("steps", "value")) and np.max(means) > 20 * np.min(means):
        axis.set_xscale("log")


def bars(axis, rows: list[dict], key: str) -> None:
    of_runs = by_run(rows, key)
    for y, values in enumerate(of_runs.values()):
        mean, low, high = interval(values)
        axis.barh(y, mean, color="C5")
        axis.errorbar(mean, y, xerr=[[mean - low], [high - mean]], color="black", capsize=3)
        axis.plot(values, [y] * len(values), ".", color="black", alpha=0.4, markersize=4)
    scale_axis(axis, key, [np.mean(values) for values in of_runs.values()])
    axis.set(title=TITLES.get(key, key))
    axis.set_yticks(range(len(of_runs)), of_runs)
    axis.grid(axis="y", visible=False)
    axis.invert_yaxis()


def points(axis, rows: list[dict], key: str) -> None:
    """Means and intervals, where bars from zero on would all look alike"""
    of_runs = by_run(rows, key)
    for y, values in enumerate(of_runs.values()):
        mean, low, high = interval(values)
        axis.errorbar(mean, y, xerr=[[mean - low], [high - mean]], color=f"C{y}", fmt="o", capsize=4)
        axis.plot(values, [y + 0.2] * len(values), ".", color=f"C{y}", alpha=0.4, markersize=4)
    axis.set_yticks(range(len(of_runs)), of_runs)
    axis.set(title=f"{key} at the end")
    axis.grid(axis="y", visible=False)
    axis.invert_yaxis()


def mean_curve(rows: list[dict], run: str, key: str, clock: str) -> np.ndarray:
    """[lines, (clock, key)], means over seeds; clock: steps, all_steps or all_seconds"""
    lines = {}
    for row in rows:
        if row["run"] == run and row.get(key):
            lines.setdefault(int(row["steps"]), []).append((float(row[clock]), float(row[key])))
    means = [np.mean(lines[steps], axis=0) for steps in sorted(lines)]
    return np.reshape(means, (-1, 2))


def curves(axis, rows: list[dict], key: str, clock: str = "steps", xlabel: str = "env steps") -> None:
    for run, number in numbered(rows).items():
        line = mean_curve(rows, run, key, clock)
        axis.plot(line[:, 0], line[:, 1], label=run, **line_style(number))
    axis.set(xlabel=xlabel, title=TITLES.get(key, key))
    many = len(numbered(rows)) > 6
    axis.legend(**OUTSIDE if many else {})


def curves_over_all_steps(axis, rows: list[dict], key: str) -> None:
    curves(axis, rows, key, "all_steps", "env steps, those of watched games too")


def curves_over_all_seconds(axis, rows: list[dict], key: str) -> None:
    curves(axis, rows, key, "all_seconds", "seconds from the start, preparation too")


def late_curves(axis, rows: list[dict], key: str) -> None:
    """The upper quarter, where the runs differ"""
    curves(axis, rows, key)
    top = max(float(row[key]) for row in rows if row.get(key))
    axis.set_ylim(0.75 * top, 1.01 * top)


def meeting(axis, rows: list[dict], players: str) -> None:
    """return while it meets the same co-players"""
    rows = [row for row in rows if row["co_players"] == players and row["learner"] == "learning"]
    for run, number in numbered(rows).items():
        of_run = [row for row in rows if row["run"] == run]
        steps = [int(row["steps"]) for row in of_run]
        returns = [float(row["return"]) for row in of_run]
        axis.plot(steps, returns, label=run, **line_style(number))
    axis.set(xlabel="env steps with them", title=f"return beside {players}, learning")
    axis.legend(**OUTSIDE)


def with_four_learners(rows: list[dict], key: str) -> list[str]:
    """Runs without rule-based players; where all share one learner, some metrics have one value for all seats"""
    rule_based = {row["run"] for row in rows if "--seats" in row.get("flags", "")}
    return [run for run in by_run(rows, f"{key}_3") if run not in rule_based]


def seats(axis, rows: list[dict], key: str) -> None:
    """Return (key: player) or MOA's cross-entropy (moa_nll) of the learner in each seat"""
    runs = with_four_learners(rows, key)
    for i in range(4):
        of_runs = by_run(rows, f"{key}_{i}")
        means = np.array([interval(of_runs[run]) for run in runs])  # [runs, (mean, low, high)]
        spread = np.abs(means[:, 1:] - means[:, :1]).T
        y = np.arange(len(runs)) + 0.15 * i
        axis.errorbar(means[:, 0], y, xerr=spread, fmt="o", capsize=3, label=f"seat {i + 1}")
    scale_axis(axis, key, means[:, 0])
    axis.set(yticks=np.arange(len(runs)) + 0.22, title=f"{TITLES.get(key, 'return')} by seat")
    axis.set_yticklabels(runs)
    axis.invert_yaxis()
    axis.legend()


def dose(axis, rows: list[dict], flag: str, key: str) -> None:
    """Of runs that differ from HOP+ in one flag, on each board"""
    of_runs = by_run(rows, key)
    for board in BOARDS:
        labels = [dose_label(flag, value, board) for value in DOSES[flag]]
        places = [x for x, label in enumerate(labels) if label in of_runs]
        means = np.array([interval(of_runs[labels[x]]) for x in places]).reshape(-1, 3)
        spread = np.abs(means[:, 1:] - means[:, :1]).T
        axis.errorbar(places, means[:, 0], yerr=spread, marker="o", capsize=3, label=board)
    axis.set_xticks(range(len(DOSES[flag])), DOSES[flag])
    axis.set(xlabel=f"--{flag}", title=TITLES.get(key, key))
    axis.legend()


def return_by_dose(axis, rows: list[dict], flag: str) -> None:
    dose(axis, rows, flag, "return")


def steps_by_dose(axis, rows: list[dict], flag: str) -> None:
    """Of the seeds that have such a return"""
    dose(axis, rows, flag, "steps_to_2.8")


def adaptation(axis, scores: dict[str, dict[str, float]], _: str) -> None:
    players = list(dict.fromkeys(p for row in scores.values() for p in row))
    table = np.array([[row.get(p, np.nan) for p in players] for row in scores.values()])
    heat_map(axis, table)
    axis.set(title="score: random 0, best response 1")
    axis.set_xticks(range(len(players)), players, rotation=35, ha="right")
    axis.set_yticks(range(len(scores)), scores)


def together(axis, rows: list[dict], _: str) -> None:
    """By how many games the learner and its partner have played with each other"""
    rows = [row for row in rows if not row["population"]]  # the partners of the training
    for run, number in numbered(rows).items():
        for key, style in (("return", "-"), ("shuffled", ":")):
            games = by_game(rows, run, key)
            means = [interval(values)[0] for values in games.values()]
            label = run if key == "return" else None
            axis.plot(list(games), means, style, color=f"C{number}", label=label)
    axis.set(xlabel="game together (dotted: subgoals of other games)", title="return, frozen")
    axis.set_xticks(range(2, 21, 2))
    axis.legend(**OUTSIDE)


KNOWN = {"Bayes": "grey", "ceiling": "black"}  # what can be known about a co-player, and its colour


def moa(axis, rows: list[dict], score: str) -> None:
    """MOA's NLL or top-1, a row for each kind of co-player; what can be known as upright lines"""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    runs = numbered(rows)
    for place, (run, number) in enumerate(runs.items()):
        for y, kind in enumerate(kinds):
            of_kind = [row for row in rows if row["run"] == run and row["kind"] == kind]
            if not of_kind:
                continue
            height = y + 0.8 * (place + 0.5) / len(runs) - 0.4
            mean, low, high = interval([float(row[score]) for row in of_kind])
            spread = [[mean - low], [high - mean]]
            axis.errorbar(mean, height, xerr=spread, color=f"C{number}", fmt="o", capsize=3)
            for name, colour in KNOWN.items():
                known = np.mean([float(row[f"{score} {name}"]) for row in of_kind])
                axis.plot(known, height, "|", color=colour, markersize=10, markeredgewidth=2)
    for run, number in runs.items():
        axis.plot([], [], "o", color=f"C{number}", label=run)
    for name, colour in KNOWN.items():
        axis.plot([], [], "|", color=colour, markeredgewidth=2, label=name)
    axis.set(title=f"MOA's {score} by co-player", xlabel=score, ylabel="co-player")
    axis.set_yticks(range(len(kinds)), kinds)
    axis.invert_yaxis()
    axis.legend(loc="upper left", bbox_to_anchor=(0, -0.15), ncols=2)


def label_cells(axis, rows: list[str], columns: list[str]) -> None:
    axis.set_yticks(range(len(rows)), rows)
    axis.set_xticks(range(len(columns)), columns, rotation=35, ha="right")


def moa_actions(axis, rows: list[dict], figure: str) -> None:
    """Recall or precision of each action; below MOA's what the co-player's own probabilities give"""
    actions = list(dict.fromkeys(row["action"] for row in rows))
    cells = {}
    for row in sorted(rows, key=lambda row: row["kind"]):
        label = f"{row['kind']}: {row['run']}"
        cells.setdefault(label, {})[row["action"]] = float(row[figure])
        cells.setdefault(f"{label}, ceiling", {})[row["action"]] = float(row[f"{figure} ceiling"])
    table = np.array([[of_actions[action] for action in actions] for of_actions in cells.values()])
    heat_map(axis, table)
    label_cells(axis, list(cells), actions)
    axis.set(title=f"{figure} of each action", xlabel="action", ylabel="co-player: run")


def moa_confusion(axis, rows: list[dict], run: str) -> None:
    """In each row, the shares of what MOA guessed when this was done"""
    actions = list(dict.fromkeys(row["action"] for row in rows))
    cells = {}
    for row in rows:
        if row["run"] == run and int(row["times"]) > 0:
            shares = [float(row[f"guessed {action}"]) / int(row["times"]) for action in actions]
            cells[f"{row['kind']}: {row['action']}"] = shares
    heat_map(axis, np.array(list(cells.values())))
    label_cells(axis, list(cells), actions)
    axis.set_title(f"{run}: what was done, what was guessed")
    axis.set(xlabel="MOA's likeliest action", ylabel="what was done")


# ---- Tables


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


def steps_to(rows: list[dict], run: str, goal: float) -> list[float]:
    """Steps that each seed needs to a return of `goal`; infinity where it never has it"""
    first = {}
    for row in rows:
        if row["run"] == run and row.get("return"):
            steps = float(row["steps"]) if float(row["return"]) >= goal else math.inf
            first[row["seed"]] = min(first.get(row["seed"], math.inf), steps)
    return list(first.values())


def print_ladder(docs: Path, number: str) -> None:
    """What knowing is worth: paired differences to `none`, and as a share of what the exact posterior gains"""
    rows = read(docs, number)
    curve_rows = read(docs, number, "_curves")
    returns = by_run(rows, "return")
    if "none" not in returns:  # --only others
        return
    of_none = interval(returns["none"])[0]
    posterior = paired(rows, "posterior", "none")
    table = []
    for run in labels_in(rows):
        gain = paired(rows, run, "none")
        share = ""
        if posterior and posterior[0] > 0.05:
            share = f"{gain[0] / posterior[0]:.0%}"
        steps = np.median(steps_to(curve_rows, run, 0.95 * of_none)) / 1e6
        cells = [run, plus_minus(interval(returns[run])), plus_minus(gain), share]
        table.append([*cells, plus_minus(paired(rows, run, "GRU")), f"{steps:.2f}"])
    gains = ["gain over none", "of the posterior's gain", "against the GRU"]
    print_table(["arm", "return", *gains, "M steps to 95 % of none"], table)


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
    timing = TIMINGS[number]
    rows = read(docs, number, "_curves")
    searched = [float(row["all_seconds"]) for row in rows if row["run"] == SEARCH_LABEL]
    if not searched:  # --only others
        return
    path = docs / "data" / timing.decisions
    decisions = read_csv(path) if path.exists() else []
    sizes = list(dict.fromkeys(row["games"] for row in decisions))
    milliseconds = {}
    for row in decisions:
        milliseconds[row["run"], row["games"]] = f"{float(row['milliseconds']):.3g}"
    seconds = max(searched)
    table = []
    for run in labels_in(rows):
        of_decisions = [milliseconds.get((run, games), "") for games in sizes]
        table.append([*time_row(rows, run, timing.same_steps, seconds), *of_decisions])
    header = [
        "run",
        f"return after {timing.same_steps} steps",
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


PARTS = ("first fifth", "second", "third", "fourth", "last fifth")


def party_shares(rows: list[dict], run: str, size: int) -> list[float]:
    """Share of games in which so many take the stag, in each fifth of the run"""
    key = f"party_{size}"
    counted = [row for row in rows if row["run"] == run and row.get(key)]
    end = max(int(row["steps"]) for row in counted)
    parts = [[] for _ in PARTS]
    for row in counted:
        part = math.ceil(len(PARTS) * int(row["steps"]) / end) - 1
        parts[part].append(float(row[key]))
    return [float(np.mean(shares)) if shares else math.nan for shares in parts]


def print_parties(docs: Path, number: str) -> None:
    """Who joins when"""
    rows = [row for row in read(docs, number, "_curves") if row.get("party_2")]
    table = []
    for run in labels_in(rows):
        of_sizes = [party_shares(rows, run, size) for size in (2, 3, 4)]
        cells = [" / ".join(f"{share:.2f}" for share in shares) for shares in zip(*of_sizes, strict=True)]
        table.append([run, *cells])
    if table:
        print_table(["share of games in which 2 / 3 / 4 take the stag", *PARTS], table)


DOSE_COLUMNS = {  # what is said about a dose: key
    "return": "return",
    "steps to 2.8": "steps_to_2.8",
    "real samples": "real_samples",
    "imagined samples": "imagined_samples",
    "rewards outside": "raw_reward_outside",
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


def seat_table(rows: list[dict], run: str, key: str) -> np.ndarray:
    """[seeds, seats]"""
    names = [f"{key}_{i}" for i in range(4)]
    complete = [row for row in rows if row["run"] == run and all(row.get(name) for name in names)]
    return np.array([[float(row[name]) for name in names] for row in complete])


def trend_test(rows: list[dict], run: str, key: str = "player") -> float:
    """p of Page's test: seats do not differ, or it falls from seat 1 to seat 4, in the ranks of each seed"""
    table = seat_table(rows, run, key)
    if len(table) < 2:
        return math.nan
    from_seat_4 = table[:, ::-1]
    return float(stats.page_trend_test(from_seat_4).pvalue)


def seat_test(rows: list[dict], run: str, draws: int = 20_000, key: str = "player") -> tuple[np.ndarray, float]:
    """mean return (or another key) of each seat, and p of a permutation test: seats exchanged within each seed,
    variance of the four means"""
    table = seat_table(rows, run, key)
    order = np.random.default_rng(0).random((draws, *table.shape)).argsort(2)
    shuffled = np.take_along_axis(np.broadcast_to(table, order.shape), order, 2)
    variances = shuffled.mean(1).var(1)
    means = table.mean(0)
    return means, float((variances >= means.var() - 1e-12).mean())


def normalised(rows: list[dict], of_references: dict, sets: str) -> dict[str, dict[str, float]]:
    """run and mode -> co-players -> score; random 0, best response 1 (of the run that measured them on this board, as
    the Bayes hunter)"""
    scores = {}
    for row in rows:
        if row["sets"] != sets:
            continue
        board = board_of(row["run"])
        low, high = of_references.get((board, row["co_players"]), (math.nan, math.nan))
        for mode in (BAYES, "frozen", "search", "unguarded", "learning", "both"):
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
    pairs.append(("HOP+ MCTS", "search", "HOP+ MCTS", "frozen"))
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

SUMMARIES = {"worst": draw_worst}
DRAWS = {  # kind of panel: function, the table that it draws
    "bars": (bars, ""),
    "points": (points, ""),
    "seats": (seats, ""),
    "curves": (curves, "_curves"),
    "late curves": (late_curves, "_curves"),
    "curves over all steps": (curves_over_all_steps, "_curves"),
    "curves over all seconds": (curves_over_all_seconds, "_curves"),
    "moa": (moa, "_moa"),
    "moa actions": (moa_actions, "_moa_actions"),
    "moa confusion": (moa_confusion, "_moa_actions"),
    "adaptation": (adaptation, "_adaptation"),
    "meeting": (meeting, "_adaptation_curves"),
    "together": (together, "_together"),
    "return by dose": (return_by_dose, ""),
    "steps by dose": (steps_by_dose, ""),
}


def has_data(kind: str, key: str, source: list[dict], scores: dict) -> bool:
    """Not every table has what a panel draws"""
    if kind == "adaptation":
        return bool(scores[key])
    if kind == "moa confusion":
        return key in labels_in(source)
    needed = {"bars": key, "seats": f"{key}_3"}.get(kind)
    return bool(source) and (needed is None or bool(by_run(source, needed)))


def name_runs_once(axes) -> None:
    """Panels side by side that have the same runs: only the first names them, or the last in its legend"""
    names = [tuple(label.get_text() for label in axis.get_yticklabels()) for axis in axes]
    for axis, own, left in zip(axes[1:], names[1:], names, strict=False):
        if own == left and axis.yaxis.get_inverted():
            axis.tick_params(labelleft=False)
    names = [axis.get_legend_handles_labels()[1] for axis in axes]
    for axis, own, right in zip(axes, names, names[1:], strict=False):
        if own and own == right:
            axis.get_legend().remove()


def draw_panels(docs: Path, number: str, rows: list[dict], panels: list, scores: dict) -> None:
    import matplotlib.pyplot as plt

    order = labels_in(rows)
    count = len(order)
    action_rows = read(docs, number, "_moa_actions")
    lines = {
        "adaptation": max(map(len, scores.values())),
        "seats": 1.5 * count,
        "meeting": 8,
        "moa": 4 * count,
        "moa actions": 2 * len(action_rows) / 7,
        "moa confusion": 28,
    }
    heights = [max(3.6, 1.6 + 0.22 * lines.get(kind, count)) for kind, _ in panels]
    columns = {4: 2, 8: 4}.get(len(panels), min(3, len(panels)))
    heights = [max(heights[k : k + columns]) for k in range(0, len(heights), columns)]
    figure, axes = plt.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
    figure.set_size_inches(5.6 * columns, sum(heights))
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (kind, key) in zip(axes.flat, panels, strict=False):
        function, source = DRAWS[kind]
        drawn = scores[key] if kind == "adaptation" else read(docs, number, source)
        if kind != "adaptation":
            drawn = [row | {"number": order.index(row["run"])} for row in drawn]
        function(axis, drawn, key)
    for row in axes:
        name_runs_once(row)
    figure.tight_layout()
    title = SECTIONS[number].title
    if number.isdigit():
        title = f"{number}. {title}"
    figure.suptitle(title, y=1, verticalalignment="bottom")
    save(docs, figure, f"section_{number}")


def cell_of(values: list[float], count: int, key: str) -> str:
    """Mean and interval of one run; `count`: its seeds"""
    if not values:
        return "never" if "_to_" in key else ""
    mean, low, high = interval(values)
    text = f"{mean:.4g} [{low:.4g}, {high:.4g}]"
    return text if len(values) == count else f"{text} ({len(values)} of {count} seeds)"


def print_section(docs: Path, number: str, rows: list[dict], panels: list, scores: dict) -> None:
    keys = ["return"]
    for key in (key for kind, key in panels if kind == "bars"):
        keys.append(key)
        if key in PRINTED_BESIDE:
            keys.append(PRINTED_BESIDE[key])
    keys = list(dict.fromkeys(keys))
    table = []
    for run in labels_in(rows):
        count = sum(row["run"] == run for row in rows)
        cells = [cell_of(by_run(rows, key).get(run, []), count, key) for key in keys]
        table.append([run, str(count), *cells])
    print(f"\n## {number}. {SECTIONS[number].title}")
    print_table(["run", "seeds", *keys], table)
    for key in (key for kind, key in panels if kind == "seats"):
        for run in with_four_learners(rows, key):
            means, p = seat_test(rows, run, key=key)
            of_seats = ", ".join(f"{mean:.3f}" for mean in means)
            ordered = trend_test(rows, run, key)
            print(f"{run}: {key} by seat {of_seats}; all equal: p = {p:.2g}; does not fall: p = {ordered:.2g}")
    if number in TASKS:
        print_ladder(docs, number)
    print_together(docs, number)
    print_parties(docs, number)
    for flag in (key for kind, key in panels if kind == "return by dose"):
        print_doses(rows, flag)
    if number in TIMINGS:
        print_time(docs, number)
    print_moa(docs, number)
    print_moa_actions(docs, number)
    for of_runs in scores.values():
        for run, of_sets in of_runs.items():
            texts = [f"{players} {value:.3f}" for players, value in of_sets.items()]
            print(f"{run}: {', '.join(texts)}")
    print_differences(docs, number)


def draw(docs: Path, number: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.style.use(STYLE)
    if number in SUMMARIES:
        SUMMARIES[number](docs)
        return
    rows = read(docs, number)
    if not rows:
        print(f"section {number}: no data yet")
        return
    met = read(docs, number, "_adaptation")
    of_references = references(docs, SECTIONS[number].references)
    scores = {sets: normalised(met, of_references, sets) for sets in CO_PLAYER_SETS}
    panels = []
    for kind, key in SECTIONS[number].panels:
        if has_data(kind, key, read(docs, number, DRAWS[kind][1]), scores):
            panels.append((kind, key))
    draw_panels(docs, number, rows, panels, scores)
    print_section(docs, number, rows, panels, scores)
