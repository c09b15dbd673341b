"""See what a hunter thinks: games of a checkpoint in the browser, and in each step what every learner believes.

    python evaluation/inspector.py runs/RUN                                # writes inspect_<seats>.html beside it
    python evaluation/inspector.py runs/RUN --games 8 --seed 1 --out page.html
    python evaluation/inspector.py runs/RUN --seats learner,nearest_stag,nearest_hare,random
    python evaluation/inspector.py runs/RUN --script my_copy.py -- --planner none    # flags of the script

RUN, `--script` and what follows `--`: as in evaluate.py. It plays games with a checkpoint's learners, asks the script's
own functions what each learner believed in each step, and writes the answers into `inspector.html`. Of a run of several
seeds the first one plays. `docs/inspector.md` explains the page.
"""

import dataclasses
import itertools
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stag_hunt_env as game
from evaluation import runs
from evaluation.runs import Run, RunFlags, Seated, check_writable, learner_seats, play, seats_of
from evaluation.subgoals import PREY

import numpy as np
import torch
import tyro
from torch.nn import functional as F
from torch.utils._pytree import tree_map

TEMPLATE = Path(__file__).resolve().parent / "inspector.html"
ABOUT_OTHERS = ("moa", "goal", "without", "memory")  # one entry for each co-player
SEARCHED = ("visits", "q", "played", "search")  # what a script that searches adds to the outputs of a rollout
LOOK_AHEAD = "what it hunts first"  # a goal of no categories of its own: read from the samples
GOAL_DRAWS = 16  # subgoals over which MOA's prediction is averaged
ROWS = 8192  # imagined at a time
CELLS = 3_500_000  # imagined in all, if nobody says how many samples
DIGITS = 5  # of the numbers in the page


@dataclasses.dataclass
class InspectFlags:
    seats: str | None = None
    """who sits where, one name a seat: learner, mixed, a player or a stranger (None: as in training)"""
    games: game.Count = 8
    """games to show"""
    places: game.Count = 2
    """where they are played: at each place one after the other, and nobody knows each other at the start"""
    steps_ahead: game.Count = 4
    """how far the models are rolled forward from each step"""
    samples: game.Count | None = None
    """how often (None: 128 on a GPU; on a CPU 16 to 128, so that it takes a few seconds)"""
    out: str | None = None
    """the file to write (None: inspect_<seats>.html beside the checkpoint)"""


@dataclasses.dataclass
class Args(RunFlags, InspectFlags):
    path: str = tyro.MISSING
    run: Run | None = None


def parse_args(words: list[str]) -> Args:
    return runs.parse_args(words, Args, {"run": RunFlags, "inspection": InspectFlags})


# ---- Games


def seat_learners(run: Run, table: list[str], seed: int, **changes) -> Seated:
    """The learners of the first seed, in the seats of `table`"""
    index = runs.learner_indices(run, table, num_seeds=1)
    return runs.seat_learners(run, [table], seed, index, seats=",".join(table), **changes)


def visible(state: game.State, returns) -> dict[str, torch.Tensor]:
    return game.copy_state(state)._asdict() | {"returns": returns.clone()}


@torch.no_grad()
def record_games(run: Run, state: Seated, games: list[int]) -> tuple[NamedTuple, dict, dict]:
    """Plays until `games` [B] have ended at each place. -> the script's Transitions [M, T, E, ...], with histories in
    full precision; what everybody can see, before each step and after the last of a game, [T, B, ...] by seat; what
    searches found [M, T, E, ...]"""
    env = state.games.env
    seats = state.games.seats
    ended = torch.zeros(env.num_envs, dtype=torch.int64)
    nobody = torch.zeros(*seats.learner_seat.shape, game.NUM_ACTIONS, device=env.device)
    first_seat = int(seats.learner_seat[0, 0])
    transitions = []
    seen = []
    searched = []
    while (ended < torch.tensor(games)).any():
        before = visible(env.state, env.episode_return)
        kinds = seats.kinds.clone()
        rule_based = seats.action_probs(env.state, nobody)
        history = state.games.history.clone()[:, None]
        step, outputs, episodes = play(run, state, 1)
        transitions.append(step._replace(history=history))
        searched.append({name: outputs[name] for name in SEARCHED if name in outputs})
        learner_probs = outputs.get("played", outputs["log_probs"].exp())[:, 0]
        actions = seats.to_seats(step.joint[:, 0], step.joint[:1, 0, :1])[:, first_seat]
        done = episodes["done"][0]
        seen.append(
            {
                **before,
                **{f"final_{name}": x for name, x in visible(env.final_state, env.final_return).items()},
                "kinds": kinds,
                "probs": seats.to_seats(learner_probs, rule_based),
                "actions": actions.roll(first_seat, 1),  # from ego order
                "done": done,
            }
        )
        ended += done.cpu()
    whole = tree_map(lambda *x: torch.cat(x, 1), *transitions)
    return whole, tree_map(lambda *x: torch.stack(x), *seen), tree_map(lambda *x: torch.cat(x, 1), *searched)


# ---- Beliefs


def flat_steps(transitions):
    """[M, T, E, ...] -> [M, T*E, ...]"""
    return tree_map(lambda x: x.flatten(1, 2), transitions)


def infer(run: Run, state: Seated, steps, history):
    """The script's belief about co-players in steps [M, n, ...] -> clock, views, OpponentBelief (no models: None)"""
    script = run.script
    env = state.games.env
    networks = state.networks
    clock = steps.time / env.config.final_time
    if networks.inference is None:
        return clock, script.entity_views(env, steps.board, steps.walls, 1), None
    views = script.entity_views(env, steps.board, steps.walls)
    belief = script.infer_opponents(state.args, env, networks, views, clock, history)
    return clock, views, belief


def expected_actions(run: Run, state: Seated, belief, clock) -> torch.Tensor:
    """MOA's probabilities [M, n, K, 7], averaged over the co-players' subgoals: over draws of them, the same in all
    rows, or over the categories. With --subgoals actions the draws make no difference."""
    script = run.script
    args = state.args
    params = belief.params
    if args.goal_kind == "discrete":
        noise = 1e4 * torch.eye(args.goal_dim, device=params.device)  # each category in turn
        weights = script.goal_mean(args.goal_kind, params).unflatten(1, (clock.shape[1], -1)).unbind(-1)
    else:
        torch.manual_seed(0)
        noise = script.goal_noise(args, GOAL_DRAWS, device=params.device)
        weights = torch.full((GOAL_DRAWS,), 1 / GOAL_DRAWS, device=params.device)
    expected = 0.0
    for draw, weight in zip(noise, weights, strict=True):
        draw = draw.expand(*params.shape[:2], -1)
        expected += weight[..., None] * script.predict_actions(args, state.networks, belief, clock, draw).exp()
    return expected


def goal_names(args) -> tuple[str, list[str]]:
    """What the page shows of a co-player's goal, and the categories"""
    if args.subgoals == "hop":
        return "Bayes' rule", ["stag", "hare"]
    if args.goal_kind == "discrete":
        return "categories of g", [f"goal {k}" for k in range(args.goal_dim)]
    return LOOK_AHEAD, list(PREY)


def goal_probs(run: Run, state: Seated, belief) -> torch.Tensor:
    """Of a goal that has categories of its own: [M, n, K, categories]"""
    goals = run.script.goal_mean(state.args.goal_kind, belief.params)
    return goals.unflatten(1, belief.present.shape[1:])


def forget_earlier_games(history) -> torch.Tensor:
    """[..., 2 * hidden] -> the same, as if this were the first game together"""
    now, before = history.chunk(2, -1)
    return torch.cat([now, torch.zeros_like(before)], -1)


@torch.no_grad()
def read_minds(run: Run, state: Seated, transitions) -> dict[str, torch.Tensor]:
    """What each learner thought before each step, each [M, T, E, ...]. `goal`: where goals have
    categories of their own (else: see look_ahead); `without`: the same if nothing had been carried
    over from earlier games; `memory`: how much was"""
    args = state.args
    steps = flat_steps(transitions)
    clock, views, belief = infer(run, state, steps, steps.history)
    goals = clock.new_zeros(*clock.shape, 0)
    if belief is not None:
        goals = belief.goals
    policy = state.networks.policy
    last_joint = steps.last_joint.long()
    _, _, log_probs, value = run.script.evaluate_policy(args, policy, views, clock, last_joint, goals)
    minds = {"policy": log_probs.exp(), "value": value}
    kind, _ = goal_names(args)
    if kind != LOOK_AHEAD:
        minds["goal"] = goal_probs(run, state, belief)
    if belief is not None:
        minds["moa"] = expected_actions(run, state, belief, clock)
        _, before = steps.history.chunk(2, -1)
        minds["memory"] = 0.5 + before if args.subgoals == "hop" else before[..., :1]
        if kind != LOOK_AHEAD:
            _, _, stranger = infer(run, state, steps, forget_earlier_games(steps.history))
            minds["without"] = goal_probs(run, state, stranger)
    return {name: x.unflatten(1, transitions.time.shape[1:]) for name, x in minds.items()}


# ---- The next steps


def game_rules(env, board, walls, joint) -> torch.Tensor:
    """The next board by the game's own rules. board [M, n, N + P], walls [M, n, _], joint action [M, n, N]"""
    config = env.config
    gone = config.num_cells
    players, prey = board.flatten(0, 1).int().split([config.num_players, config.num_prey], 1)
    clock = torch.zeros(len(players), dtype=torch.int32, device=env.device)
    state = game.State(
        position=players.clamp(max=gone - 1),
        present=players < gone,
        prey_position=prey.clamp(max=gone - 1),
        prey_alive=prey < gone,
        walls=walls.flatten(0, 1).expand(-1, gone),
        time=clock,
        first_hunt=clock - 1,
    )
    after, _, _, _ = env.transition(state, joint.flatten(0, 1))
    return env.cells(after)[:, 0].view_as(board)


class ImaginedStep(NamedTuple):
    """Of n rollouts"""

    board: torch.Tensor  # [M, n, N + P] before it
    joint: torch.Tensor  # [M, n, N] what everybody does
    next_board: torch.Tensor  # [M, n, N + P]
    over: torch.Tensor  # bool [M, n]: the game had ended before it


def game_over(config, time, first_hunt) -> torch.Tensor:
    """bool [M, n], by the clock"""
    over = time >= config.final_time
    limit = config.steps_after_first_hunt
    if limit is not None:
        over |= (first_hunt >= 0) & (time - first_hunt >= limit)
    return over


def roll_forward(run: Run, state: Seated, start, samples: int):
    """From steps `start` [M, n, ...], each `samples` times: yields one ImaginedStep of
    [M, n * samples] after another, without end"""
    script = run.script
    args = state.args
    env = state.games.env
    config = env.config
    networks = state.networks
    num_starts = start.time.shape[1]

    def repeat(x):  # [M, n * k, ...] -> [M, n * samples * k, ...]
        return x.unflatten(1, (num_starts, -1)).repeat_interleave(samples, 1).flatten(1, 2)

    clock, views, belief = infer(run, state, start, start.history)
    start, clock, views, belief = tree_map(repeat, (start, clock, views, belief))
    board = start.board
    time = start.time.int()
    first_hunt = start.first_hunt.int()
    last_joint = start.last_joint.long()
    noise = script.goal_noise(args, *belief.params.shape[:2], device=env.device)
    while True:
        _, _, log_probs, _ = script.evaluate_policy(args, networks.policy, views, clock, last_joint, belief.goals)
        others = script.predict_actions(args, networks, belief, clock, noise)
        joint = game.sample(torch.cat([log_probs[:, :, None], others], 2).exp())
        if networks.world is None:
            next_board = game_rules(env, board, start.walls, joint)
        else:
            next_board, _ = script.predict_step(networks.world, board, start.walls, joint)
        yield ImaginedStep(board, joint, next_board, game_over(config, time, first_hunt))
        time = time + 1
        caught = (next_board != board)[..., config.num_players :].any(2)
        first_hunt = torch.where(caught & (first_hunt < 0), time, first_hunt)
        board = next_board
        last_joint = joint
        clock = clock + 1 / config.final_time
        views = script.entity_views(env, board, start.walls)
        seen_board, walls, legal = script.co_players(views)
        belief = belief._replace(board=seen_board, walls=walls, legal=legal)
        if args.subgoals == "actions":
            belief = script.infer_opponents(args, env, networks, views, clock, start.history)


def choose_samples(env, num_starts: int, num_steps: int) -> int:
    """128 on a GPU; else as many as a few seconds allow, a power of two"""
    if env.device.type == "cuda":
        return 128
    affordable = CELLS // (num_starts * num_steps * (env.config.num_cells + 32))
    power_of_two = 1 << max(1, affordable).bit_length() - 1
    return min(128, max(16, power_of_two))


def note_hunts(config, imagined: ImaginedStep, first_hunts):
    """first_hunts [M, n, K]: what each co-player hunted first, its place in PREY. -> the same
    after this step; whether nobody is left who may still hunt"""
    on_board = imagined.board[..., 1 : config.num_players] < config.num_cells
    may_hunt = on_board & ~imagined.over[..., None]
    hunted = (imagined.joint[..., 1:] - game.STAY).clamp(min=0) * may_hunt
    first_hunts = torch.where(first_hunts == 0, hunted, first_hunts)
    still_waiting = may_hunt & (first_hunts == 0)
    return first_hunts, not still_waiting.any()


class LookAhead(NamedTuple):
    cells: torch.Tensor  # [M, T, E, steps, N, H*W + 1] samples with a player on a cell (the last: gone)
    hunts: torch.Tensor  # [M, T, E, K, 3] share of samples in which a co-player first hunts: see PREY
    samples: int


@torch.no_grad()
def look_ahead(
    run: Run,
    state: Seated,
    transitions,
    shown,
    steps_ahead: int,
    hunt_steps: int,
    samples: int | None,
) -> LookAhead:
    """Rolls MOA and the world model (if there is none: the game's rules) forward from the steps
    shown, bool [T, B]: `steps_ahead` for the cells, and at most `hunt_steps` until everybody hunts.
    A sample draws the co-players' subgoals once and keeps them, as a search does."""
    env = state.games.env
    config = env.config
    steps = flat_steps(transitions)
    present = steps.board[..., 0] < config.num_cells
    asked = present & state.games.seats.per_learner(shown.T).mT.flatten(1)  # [M, T*E]
    most = int(asked.sum(1).max())
    order = asked.byte().argsort(dim=1, descending=True, stable=True)[:, :most]  # [M, n]
    num_steps = max(steps_ahead, hunt_steps)
    if samples is None:
        samples = choose_samples(env, order.numel(), num_steps)
    players = config.num_players
    device = env.device
    cells_shape = (*asked.shape, steps_ahead, players, config.num_cells + 1)
    cells = torch.zeros(cells_shape, dtype=torch.int32, device=device)
    hunts = torch.zeros(*asked.shape, players - 1, len(PREY), device=device)
    learner = torch.arange(len(order), device=device)[:, None]
    for number, rows in enumerate(order.split(max(1, ROWS // samples // len(order)), 1)):
        torch.manual_seed(number)  # with and without earlier games: the same luck
        start = tree_map(lambda x, rows=rows: x[learner, rows], steps)
        hunts_shape = (len(order), rows.shape[1] * samples, players - 1)
        first_hunts = torch.zeros(hunts_shape, dtype=torch.int64, device=device)
        all_hunted = hunt_steps == 0
        rollouts = itertools.islice(roll_forward(run, state, start, samples), num_steps)
        for step, imagined in enumerate(rollouts):
            if step < steps_ahead:
                cell = imagined.next_board[..., :players].long()
                seen = F.one_hot(cell, config.num_cells + 1).unflatten(1, (-1, samples))
                cells[learner, rows, step] = seen.sum(2, dtype=torch.int32)
            if step < hunt_steps:
                first_hunts, all_hunted = note_hunts(config, imagined, first_hunts)
            if step + 1 >= steps_ahead and all_hunted:
                break
        by_sample = F.one_hot(first_hunts, len(PREY)).unflatten(1, (-1, samples))
        hunts[learner, rows] = by_sample.float().mean(2)
    shape = transitions.time.shape[1:]
    return LookAhead(cells.unflatten(1, shape), hunts.unflatten(1, shape), samples)


# ---- The page


def by_seat(state: Seated, name: str, x) -> np.ndarray:
    """[M, T, E, ...] -> [T, B, N, ...], nothing where no learner sits. What is about the players in ego order (`ahead`;
    without oneself: ABOUT_OTHERS) -> by seat too, nothing about oneself"""
    nothing = torch.zeros((), dtype=x.dtype, device=x.device)
    x = state.games.seats.to_seats(x.movedim(1, -1), nothing).movedim(-1, 0)
    if name in ABOUT_OTHERS:
        x = torch.cat([torch.zeros_like(x[:, :, :, :1]), x], 3)
    if name == "ahead":
        x = x.transpose(3, 4)  # [T, B, observer, N, steps, H*W + 1]
    if name in (*ABOUT_OTHERS, "ahead"):
        x = state.games.env.ego_to_seats(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    return x.cpu().numpy()


def game_data(names: list[str], seen: dict[str, np.ndarray]) -> dict:
    """A whole game as everybody can see it; seen [T, ...]: before each step, and `final_`: after it"""
    shown = {}
    for name, x in seen.items():
        if f"final_{name}" in seen:
            shown[name] = np.concatenate([x, seen[f"final_{name}"][-1:]])
    present = shown["present"]
    actions = seen["actions"].tolist()
    kinds = seen["kinds"][0]
    taken = [None] * len(kinds)
    for step, seat in np.argwhere(present[:-1] & ~present[1:]).tolist():
        prey = "stag" if actions[step][seat] == game.HUNT_STAG else "hare"
        taken[seat] = {"step": step, "prey": prey}
    return {
        "names": ["learner" if kind < 0 else names[kind] for kind in kinds],
        "taken": taken,
        "prey": shown["prey_position"][0],
        "walls": np.flatnonzero(shown["walls"][0]),
        "actions": actions,
        "position": np.where(present, shown["position"], -1),
        "alive": shown["prey_alive"].astype(int),
        "time": shown["time"],
        "returns": shown["returns"],
        "probs": seen["probs"],
    }


def heat(counts: np.ndarray) -> np.ndarray:
    """[H*W + 1] -> cell, count, cell, count, ... where there are any"""
    cells = np.flatnonzero(counts)
    return np.stack([cells, counts[cells]], 1).flatten()


def mind_data(position: np.ndarray, minds: dict[str, np.ndarray], seat: int) -> dict[str, list]:
    """What the learner in `seat` thought in a game, step by step; minds [T, N, ...]. None where it, or the co-player
    that it is about, was not on the board"""
    thoughts = {name: [None] * len(x) for name, x in minds.items()}
    for t, cells in enumerate(position[:-1]):
        if cells[seat] < 0:
            continue
        for name, x in minds.items():
            thought = x[t, seat]
            if name == "ahead":
                thought = [[heat(counts) for counts in player] for player in thought]
            elif name in ABOUT_OTHERS:
                about = [cell >= 0 and j != seat for j, cell in enumerate(cells)]
                thought = [part if counts else None for part, counts in zip(thought, about, strict=True)]
            thoughts[name][t] = thought
    return thoughts


def plain(x):
    """Arrays as nested lists; numbers with as few digits as the page needs"""
    if isinstance(x, np.ndarray | np.generic):
        x = x.tolist()
    if isinstance(x, dict):
        return {name: plain(entry) for name, entry in x.items()}
    if isinstance(x, list | tuple):
        return [plain(entry) for entry in x]
    if isinstance(x, float):
        x = round(x, DIGITS)
        return int(x) if x == int(x) else x
    return x


def inspect_run(run: Run, seats: str | None, games=8, places=2, steps_ahead=4, samples=None, seed=1) -> dict:
    """Plays, and asks. -> all that the page shows"""
    table = seats_of(run, seats)
    places = min(places, games)
    wanted = [math.ceil((games - place) / places) for place in range(places)]
    state = seat_learners(run, table, seed, num_envs=places)
    config = state.args.config
    networks = state.networks
    transitions, seen, minds = record_games(run, state, wanted)
    minds |= read_minds(run, state, transitions)
    data = page_settings(run, state, table, seed)
    if "memory" in minds:
        data["carried"] = run.script.history_decay(state.args)
    kind, categories = goal_names(state.args)
    hunt_steps = 0
    if kind == LOOK_AHEAD:  # the time to walk across the board
        hunt_steps = min(config.height + config.width, config.final_time)
    if networks.moa is not None:
        device = state.games.env.device
        game_number = seen["done"].cumsum(0) - seen["done"].long()
        shown = game_number < torch.tensor(wanted, device=device)
        ahead = look_ahead(run, state, transitions, shown, steps_ahead, hunt_steps, samples)
        minds["ahead"] = ahead.cells
        if kind == LOOK_AHEAD:
            minds["goal"] = ahead.hunts
        if kind == LOOK_AHEAD and data["carried"] > 0:
            history = forget_earlier_games(transitions.history)
            stranger = transitions._replace(history=history)
            forgetful = look_ahead(run, state, stranger, shown, 0, hunt_steps, ahead.samples)
            minds["without"] = forgetful.hunts
        model = "the game's own rules" if networks.world is None else "its world model"
        data["ahead"] = {"steps": steps_ahead, "samples": ahead.samples, "model": model}
    if "goal" in minds:
        data["goal"] = {"kind": kind, "names": categories, "steps": hunt_steps}
    minds = {name: by_seat(state, name, x) for name, x in minds.items()}
    seen = {name: x.cpu().numpy() for name, x in seen.items()}
    for place, number in enumerate(wanted):
        ends = np.flatnonzero(seen["done"][:, place])[:number].tolist()
        first = 0
        for last in ends:
            steps = slice(first, last + 1)
            first = last + 1
            shown = game_data(state.games.seats.names, {name: x[steps, place] for name, x in seen.items()})
            thoughts = {name: x[steps, place] for name, x in minds.items()}
            shown["minds"] = {seat: mind_data(shown["position"], thoughts, seat) for seat in learner_seats(table)}
            shown["place"] = place
            data["games"].append(shown)
    return plain(data)


def page_settings(run: Run, state: Seated, table: list[str], seed: int) -> dict:
    """What the page says about the run, before any game"""
    args = state.args
    config = args.config
    search = None
    if run.planner != "none":
        simulations = game.NUM_ACTIONS if args.planner == "one-step" else args.num_simulations
        search = {"planner": args.planner, "simulations": simulations, "trees": args.num_trees}
    return {
        "run": run.path.parent.name,
        "script": Path(run.script.__file__).name,
        "setting": config.setting,
        "method": args.method,
        "subgoals": args.subgoals,
        "seats": table,
        "seed": seed,
        "gamma": args.gamma,
        "height": config.height,
        "width": config.width,
        "stags": config.num_stags,
        "digits": DIGITS,
        "final_time": config.final_time,
        "actions": game.ACTION_NAMES,
        "colours": game.COLOURS,
        "sprites": game.SPRITES,
        "ink": game.INK,
        "goal": None,
        "carried": 0,
        "search": search,
        "ahead": None,
        "games": [],
    }


def write_page(path: str | Path, data: dict) -> int:
    """-> bytes"""
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    Path(path).write_text(TEMPLATE.read_text().replace("{{DATA}}", text))
    return Path(path).stat().st_size


def main(args: Args) -> dict[str, float]:
    """-> bytes of the file"""
    run = args.run
    out = run.path.parent / f"inspect_{'-'.join(seats_of(run, args.seats))}.html"
    if args.out is not None:
        out = Path(args.out)
    game.refuse(not out.parent.is_dir(), f"--out {out}: there is no folder {out.parent}")
    check_writable(out)
    data = inspect_run(run, args.seats, args.games, args.places, args.steps_ahead, args.samples, args.seed)
    size = write_page(out, data)
    print(f"{run.args.config.setting}, {run.path}: {len(data['games'])} games, {size / 1e6:.2f} MB")
    print(f"wrote {out}; open it in a browser")
    return {"bytes": size}


if __name__ == "__main__":
    game.command_line(parse_args, main)
