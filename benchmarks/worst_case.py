"""The worst case of sections 7 and 8: tables, a map of all scores, and a curve beside the hardest team."""

import itertools
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.results import (
    BAYES,
    Interval,
    in_three_signs,
    interval,
    labels_in,
    mean_returns,
    plus_minus,
    print_table,
    read,
    references,
    save,
    write,
)
from benchmarks.sections import BOARDS, METHODS, SECTIONS, board_of, label_of, method_of

import numpy as np

# ---- The worst case: what a learner earns beside the co-players that it plays worst with

CO_PLAYER_SETS = ("standard", "strangers", "learned")
METHOD_ORDER = [BAYES, *METHODS["4x4"]]
STYLE = Path(__file__).resolve().parent / "plots.mplstyle"
HARDEST = "3 waiting"  # beside them most learners earn least, so there is a table without them


class Meeting(NamedTuple):
    """A learner beside all sets of co-players of a board"""

    board: str
    method: str
    mode: str  # frozen, learning; "" for the scripted hunter
    returns: dict[str, dict[str, float]]  # co-players -> seed (of the scripted hunter: repetition) -> return
    test_steps: float | None  # real steps that are not counted as such, mean of all repetitions


class WorstCase(NamedTuple):
    num_sets: int
    worst_set: str
    worst_score: Interval
    mean_score: Interval
    regret_set: str
    worst_regret: Interval


def read_repetitions(docs: Path) -> list[dict]:
    """Of sections 7 and 8. The scripted hunter, whom nobody trained, has repetitions instead of seeds."""
    rows = [row for number in ("7", "8") for row in read(docs, number, "_adaptation_repetitions")]
    of_hunter = []
    for row in rows:
        if row.get(BAYES):
            scripted = {key: value for key, value in row.items() if key.startswith(BAYES)}
            scripted["run"] = label_of(BAYES, board_of(row["run"]))
            scripted["seed"] = row["repetition"]
            scripted["sets"] = row["sets"]
            scripted["co_players"] = row["co_players"]
            of_hunter.append(scripted)
    return rows + of_hunter


def read_meetings(docs: Path) -> list[Meeting]:
    rows = read_repetitions(docs)
    labels = labels_in(rows)
    order = [*METHOD_ORDER, *map(method_of, labels)]
    labels.sort(key=lambda label: order.index(method_of(label)))
    meetings = []
    for label, mode in itertools.product(labels, (BAYES, "frozen", "learning")):
        returns = mean_returns(rows, label, mode)
        scripted = method_of(label) == BAYES
        if not returns or scripted != (mode == BAYES):
            continue
        of_run = [row.get(f"{mode} test steps") for row in rows if row["run"] == label]
        steps = [float(value) for value in of_run if value]
        meetings.append(
            Meeting(
                board=board_of(label),
                method=method_of(label),
                mode="" if scripted else mode,
                returns=returns,
                test_steps=float(np.mean(steps)) if steps else None,
            )
        )
    return meetings


def scores_of(meeting: Meeting, of_references: dict) -> dict[str, dict[str, float]]:
    """co-players -> seed -> (return - random) / (best response - random)"""
    scores = {}
    for players, returns in meeting.returns.items():
        low, high = of_references[meeting.board, players]
        scores[players] = {seed: (value - low) / (high - low) for seed, value in returns.items()}
    return scores


def worst_case(meeting: Meeting, of_references: dict) -> WorstCase:
    """The worst set is the one with the lowest mean over seeds: the lowest of each seed's scores would be lower by
    their noise alone. Its interval is that of this set. The mean is first over sets, then over seeds."""
    scores = scores_of(meeting, of_references)
    regrets = {}
    for players, returns in meeting.returns.items():
        _, high = of_references[meeting.board, players]
        regrets[players] = [high - value for value in returns.values()]
    of_sets = {players: interval(list(of_seeds.values())) for players, of_seeds in scores.items()}
    of_regrets = {players: interval(values) for players, values in regrets.items()}
    worst_set = min(of_sets, key=lambda players: of_sets[players][0])
    regret_set = max(of_regrets, key=lambda players: of_regrets[players][0])
    seeds = set.intersection(*(set(of_seeds) for of_seeds in scores.values()))
    means = [np.mean([of_seeds[seed] for of_seeds in scores.values()]) for seed in sorted(seeds)]
    return WorstCase(
        num_sets=len(scores),
        worst_set=worst_set,
        worst_score=of_sets[worst_set],
        mean_score=interval(means),
        regret_set=regret_set,
        worst_regret=of_regrets[regret_set],
    )


def complete(meetings: list[Meeting], of_references: dict) -> list[Meeting]:
    """Those beside all co-players with references; a worst of fewer would not compare"""
    kept = []
    left_out = []
    for meeting in meetings:
        players = {players for board, players in of_references if board == meeting.board}
        met = {name: returns for name, returns in meeting.returns.items() if name in players}
        if len(met) == len(players):
            kept.append(meeting._replace(returns=met))
        else:
            name = label_of(meeting.method, meeting.board)
            left_out.append(f"{name}, {meeting.mode} ({len(met)} of {len(players)})")
    if left_out:
        print(f"left out, since they did not meet all sets: {'; '.join(left_out)}")
    return kept


def learner_name(meeting: Meeting) -> str:
    return f"{meeting.method}, {meeting.mode}" if meeting.mode else meeting.method


def worst_row(meeting: Meeting, worst: WorstCase) -> dict:
    """A row of docs/data/worst_case.csv"""
    row = {
        "board": meeting.board,
        "method": meeting.method,
        "mode": meeting.mode,
        "sets": worst.num_sets,
        "worst set": worst.worst_set,
        "worst regret set": worst.regret_set,
        "test steps": "" if meeting.test_steps is None else meeting.test_steps,
    }
    intervals = {
        "worst score": worst.worst_score,
        "mean score": worst.mean_score,
        "worst regret": worst.worst_regret,
    }
    for name, (mean, low, high) in intervals.items():
        row |= {name: mean, f"{name} low": low, f"{name} high": high}
    return row


def print_worst(board: str, learners: dict[str, tuple[Meeting, WorstCase]]) -> None:
    """learners: name -> what it met, and the worst of it"""
    if not learners:
        return
    num_sets = next(iter(learners.values()))[1].num_sets
    print(f"\n{board}, {num_sets} sets of co-players, the last quarter of the steps")
    table = []
    for name, (meeting, worst) in learners.items():
        steps = "" if meeting.test_steps is None else f"{meeting.test_steps:.0f}"
        regret = [plus_minus(worst.worst_regret, 2), worst.regret_set]
        table.append([name, *score_cells(worst), *regret, steps])
    scores = ["worst score", "beside", "mean score"]
    print_table(["learner", *scores, "worst regret", "beside", "test steps"], table)


def print_without_hardest(board: str, meetings: list[Meeting], of_references: dict) -> None:
    table = []
    for meeting in meetings:
        others = {players: returns for players, returns in meeting.returns.items() if players != HARDEST}
        if meeting.board == board and others:
            worst = worst_case(meeting._replace(returns=others), of_references)
            table.append([learner_name(meeting), *score_cells(worst)])
    if table:
        print(f"\n{board}, the last quarter of the steps, without {HARDEST}")
        print_table(["learner", "worst score", "beside", "mean score"], table)


def score_cells(worst: WorstCase) -> list[str]:
    return [plus_minus(worst.worst_score, 2), worst.worst_set, plus_minus(worst.mean_score, 2)]


def draw_worst(docs: Path) -> None:
    """docs/data/worst_case.csv, its tables, and two figures"""
    import matplotlib
    import matplotlib.style

    matplotlib.use("Agg")
    matplotlib.style.use(STYLE)
    of_references = references(docs)
    print(f"\n## {SECTIONS['worst'].title}\n")
    meetings = complete(read_meetings(docs), of_references)
    if not meetings:
        print("section worst: no data yet")
        return
    rows = []
    for board in BOARDS:
        learners = {}
        for meeting in meetings:
            if meeting.board == board:
                worst = worst_case(meeting, of_references)
                rows.append(worst_row(meeting, worst))
                learners[learner_name(meeting)] = meeting, worst
        print_worst(board, learners)
        print_without_hardest(board, meetings, of_references)
    write(docs / "data" / "worst_case.csv", rows)
    draw_worst_figure(docs, meetings, of_references)
    draw_hardest(docs)


SCORE_COLOURS = "RdYlBu"  # red: no better than a random player
# In the figure's names
SHORTER = {"switching": "switch", "waiting": "wait", "random": "rand", " + ": "+"}


def short_name(players: str) -> str:
    for word, shorter in SHORTER.items():
        players = players.replace(word, shorter)
    return players


def draw_worst_figure(docs: Path, meetings: list[Meeting], of_references: dict) -> None:
    """Scores of learners that go on learning, and of the scripted hunter: methods x sets, and the worst of each"""
    import matplotlib.pyplot as plt

    of_boards = {}
    for meeting in meetings:
        shown = meeting.method in METHOD_ORDER and meeting.mode != "frozen"
        if shown:
            of_boards.setdefault(meeting.board, []).append(meeting)
    kinds = {row["co_players"]: row["sets"] for row in read_repetitions(docs)}
    heights = [len(learners) for learners in of_boards.values()]
    figure, axes = plt.subplots(len(of_boards), 1, squeeze=False, height_ratios=heights)
    set_names = set()
    for axis, (board, learners) in zip(axes.flat, of_boards.items(), strict=True):
        sets = sorted(learners[0].returns, key=lambda players: CO_PLAYER_SETS.index(kinds[players]))
        set_names.add(tuple(sets))
        draw_board(axis, learners, sets, kinds, of_references)
        axis.set_title(board, loc="left", fontsize=12, weight="bold", pad=20)
    if len(set_names) == 1:  # said once is enough
        for axis in axes.flat[:-1]:
            axis.set_xticks([])
    figure.set_size_inches(9.6, 1.5 + 0.33 * sum(heights) + 0.5 * len(heights))
    figure.tight_layout(h_pad=0.8)
    save(docs, figure, "worst_case", dpi=110)


def draw_board(axis, learners: list[Meeting], sets: list[str], kinds: dict, of_references: dict) -> None:
    """Rows: learners. Columns: the sets, with a gap between kinds of them; at the right the worst score, and the most
    that is lost"""
    places = {}
    place = -1.0
    for players, before in zip(sets, [sets[0], *sets], strict=False):
        place += 1.0 if kinds[players] == kinds[before] else 1.3
        places[players] = place
    worst_place = place + 2.0
    lost_place = worst_place + 1.9
    for y, learner in enumerate(learners):
        scores = scores_of(learner, of_references)
        worst = worst_case(learner, of_references)
        for players, x in places.items():
            score_cell(axis, x, y, float(np.mean(list(scores[players].values()))))
        score_cell(axis, worst_place, y, worst.worst_score[0], worst=True)
        axis.text(lost_place, y, f"{worst.worst_regret[0]:.2f}", ha="center", va="center", fontsize=11)
    for kind in dict.fromkeys(kinds[players] for players in sets):
        first = min(x for players, x in places.items() if kinds[players] == kind)
        axis.text(first - 0.5, -0.62, kind, fontsize=10, va="bottom", color="0.35")
    axis.set(xlim=(-0.5, lost_place + 0.65), ylim=(len(learners) - 0.5, -0.5))
    names = [*map(short_name, sets), "worst score", "most lost"]
    style = {"rotation": 38, "ha": "right", "rotation_mode": "anchor", "fontsize": 10}
    axis.set_xticks([*places.values(), worst_place, lost_place], names, **style)
    axis.get_xticklabels()[-2].set(weight="bold", fontsize=11)
    axis.set_yticks(range(len(learners)), [learner.method for learner in learners], fontsize=11)
    axis.get_yticklabels()[-1].set_weight("bold")  # HOP+
    axis.grid(visible=False)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def score_cell(axis, x: float, y: float, score: float, worst: bool = False) -> None:
    """A number on the colour of its score; what is below 0 has the colour of 0"""
    import matplotlib.pyplot as plt

    colour = plt.get_cmap(SCORE_COLOURS)(min(max(score, 0.0), 1.0))
    half = 0.95 if worst else 0.48
    style = {"fontsize": 12, "weight": "bold"} if worst else {"fontsize": 9.5}
    style["color"] = "white" if score < 0.12 or score > 0.84 else "black"
    axis.add_patch(plt.Rectangle((x - half, y - 0.46), 2 * half, 0.92, facecolor=colour))
    text = f"{score:.2f}" if worst else in_three_signs(score)
    axis.text(x, y, text, ha="center", va="center", **style)


def draw_hardest(docs: Path) -> None:
    """docs/results/three_waiting.png: return beside the hardest team, as learners go on learning"""
    import matplotlib.pyplot as plt

    rows = read(docs, "8", "_adaptation_curves")
    figure, axes = plt.subplots(1, len(BOARDS), figsize=(9, 3.2))
    for axis, board in zip(axes, BOARDS, strict=True):
        for method in METHODS[board]:
            of_run = [row for row in rows if row["run"] == label_of(method, board)]
            steps = [int(row["steps"]) for row in of_run]
            axis.plot(steps, [float(row["return"]) for row in of_run], label=method)
        axis.set(title=f"{board}: return beside {HARDEST}, learning", xlabel="env steps with them")
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    save(docs, figure, "three_waiting")
