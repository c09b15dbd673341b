"""The work behind `inspect.py`: plays games with a checkpoint's learners, asks the script's own functions what each
learner believed in each step, and writes the answers into `inspect.html`. `docs/inspector.md` explains the page.

RUN, `--script` and what follows `--`: as in evaluate.py. Of a run of several seeds the first one plays.
"""

import contextlib
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import evaluate
import numpy as np
import torch
import tyro
from evaluate import RunFlags, check_writable, game, learner_index, make_state, play, replaced, seats_of
from subgoals import PREY, prey_taken
from torch.nn import functional as F

TEMPLATE = Path(__file__).resolve().parent / "inspect.html"
GIVEN = ("posterior", "oracle")  # subgoals that no network infers
ABOUT_OTHERS = ("moa", "goal", "without", "memory")  # one entry for each co-player
GOAL_DRAWS = 16  # subgoals over which MOA's prediction is averaged
PROBE_PLACES, PROBE_STEPS, FIT_STEPS = 24, 40, 200  # games for the probe: where, how long; and steps of its fit
ROWS, CELLS = 8192, 3_500_000  # imagined at a time; in all, if nobody says how many samples
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
    """how often (None: 128 on a GPU; on a CPU 8 to 128, so that it takes a few seconds)"""
    out: str | None = None
    """the file to write (None: inspect_<seats>.html beside the checkpoint)"""


@dataclasses.dataclass
class Args(RunFlags, InspectFlags):
    path: str = tyro.MISSING
    run: evaluate.Run | None = None


def parse_args(words: list[str]) -> Args:
    contract = evaluate.CONTRACT + evaluate.FOR_INSPECT
    return evaluate.parse_args(words, Args, {"run": RunFlags, "inspection": InspectFlags}, contract)


# ---- Games


@contextlib.contextmanager
def one_thread():
    """Small tensors: more threads cost more than they bring, on busy machines ten times the time"""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def seat_learners(run, table: list[str], seed: int, **changes):
    """A TrainState with the checkpoint's learners in the seats of `table`. Nothing is trained here, and making an
    optimizer would take a second."""
    sitting = [seat for seat, name in enumerate(table) if name == "learner"]
    index = list(dict.fromkeys(learner_index(run.checkpoint, 0, seat) for seat in sitting))
    with replaced(run.script, "make_optimizer", lambda *given, **more: None):
        return make_state(run, [table], [seed], index, seats=",".join(table), **changes)


def read_search(script, args, found: tuple) -> dict[str, torch.Tensor]:
    """What plan_actions returned -> visits and Q at the root, what is played [M, E, 7]; gain, KL, depth [M, E, 3]"""
    _, played, stats, tree = found
    _, _, visits, q = script.root_policy(args, 1.0, tree, torch.zeros_like(tree.edges[:, 0, 0]), args.num_trees)
    return {"visits": visits.view_as(played), "q": q.view_as(played), "played": played, "search": stats}


@one_thread()
@torch.no_grad()
def record_games(run, state, games: list[int]) -> tuple[NamedTuple, dict, dict]:
    """Plays until `games` [B] have ended at each place. -> the script's Transitions [M, T, E, ...], with histories in
    full precision; what everybody can see, before each step and after the last of a game, [T, B, ...] by seat; what
    searches found [M, T, E, ...]"""
    script, env, seats, plans, steps = run.script, state.env, state.seats, [], []
    searches = getattr(state.args, "planner", "none") != "none"
    plan_actions = getattr(script, "plan_actions", None)  # only of a script that can search

    def keep_plan(*given):
        plans.append(plan_actions(*given))
        return plans[-1]

    def visible(env_state, returns):
        return game.copy_state(env_state)._asdict() | {"returns": returns.clone()}

    ended = torch.zeros(env.num_envs, dtype=torch.int64)
    nobody = torch.zeros(*seats.learner_seat.shape, game.NUM_ACTIONS, device=env.device)
    first_seat = int(seats.learner_seat[0, 0])
    with replaced(script, "plan_actions", keep_plan):
        while (ended < torch.tensor(games)).any():
            seen = visible(env.state, env.episode_return) | {"kinds": seats.kinds.clone()}
            rule_based = seats.action_probs(env.state, nobody)
            history = state.rollout_state["history"].clone()[:, None]
            transitions, outputs, episodes = play(run, state, 1)
            found = read_search(script, state.args, plans.pop()) if searches else {}
            own_probs = found.get("played", outputs["log_probs"][:, 0].exp())
            seen["probs"] = seats.to_seats(own_probs, rule_based)
            seen["actions"] = seats.to_seats(transitions.joint[:, 0], transitions.joint[:1, 0, :1])[:, first_seat]
            seen["actions"] = seen["actions"].roll(first_seat, 1)  # from ego order
            seen["done"] = episodes["done"][0]
            final = {f"final_{name}": x for name, x in visible(env.final_state, env.final_return).items()}
            steps.append((transitions._replace(history=history), seen | final, found))
            ended += seen["done"].cpu()
    transitions, seen, found = zip(*steps, strict=True)
    whole = type(transitions[0])(*(torch.cat(field, 1) for field in zip(*transitions, strict=True)))
    return whole, run.script.stack_steps(seen, 0), run.script.stack_steps(found)


# ---- Beliefs


def infer(run, state, steps, history):
    """The script's belief about co-players in steps [M, n, ...] -> clock, views, OpponentBelief (no models: None)"""
    script, args, env, networks = run.script, state.args, state.env, state.networks
    clock = steps.time / env.config.final_time
    if networks.inference is None:
        return clock, script.entity_views(args, env, steps.board, steps.prey_position, 1), None
    views = script.entity_views(args, env, steps.board, steps.prey_position)
    return clock, views, script.infer_opponents(args, env, networks, views, clock, history, steps.oracle_id)


def expected_actions(run, state, belief, clock) -> torch.Tensor:
    """MOA's probabilities [M, n, K, 7], averaged over the co-players' subgoals: over draws of them, the same in all
    rows, or over the categories. Where MOA reads what is known, the draws make no difference."""
    script, args, params = run.script, state.args, belief.params
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
    known = {
        "posterior": ("exact Bayes posterior", args.population.split(",")),
        "oracle": ("told who it is", [*args.population.split(","), "learner"]),
        "bayes": ("Bayes' rule", ["stag", "hare"]),
        "hop": ("Bayes' rule", ["stag", "hare"]),
    }
    if args.subgoals in known:
        return known[args.subgoals]
    if args.goal_kind == "discrete":
        return "categories of g", [f"goal {k}" for k in range(args.goal_dim)]
    return "probe of g", list(PREY)


def goal_probs(run, state, steps, belief, probe) -> torch.Tensor | None:
    """[M, n, K, categories]"""
    args = state.args
    if args.subgoals in GIVEN:
        return steps.oracle_id[..., : len(goal_names(args)[1])]
    if belief is None:
        return None
    goals = run.script.goal_mean(args.goal_kind, belief.params)
    if probe is not None:
        goals = (F.pad(goals, (0, 1), value=1.0) @ probe).softmax(-1)
    return goals.unflatten(1, belief.present.shape[1:])


@one_thread()
@torch.no_grad()
def fit_probe(run, table: list[str], seed: int) -> torch.Tensor:
    """Logistic regression for each learner, on games of their own: g_j -> which prey j takes in this game. Those who
    search act by their policy here, to save time. -> [M, D + 1, prey]"""
    acts_by_policy = hasattr(run.args, "planner") and run.args.subgoals == "inferred"  # else it has no q_phi then
    changes = {"planner": "none"} if acts_by_policy else {}
    state = seat_learners(run, table, seed + 1000, num_envs=PROBE_PLACES, **changes)
    transitions, _, _ = play(run, state, max(PROBE_STEPS, run.args.config.final_time))
    taken, finished, _ = prey_taken(transitions)
    steps = type(transitions)(*(x.flatten(1, 2) for x in transitions))
    _, _, belief = infer(run, state, steps, steps.history.float())
    counts = (finished[..., None] & belief.present.view_as(taken)).flatten(1)
    weight = counts / counts.sum(1, keepdim=True).clamp(min=1)
    x = F.pad(run.script.goal_mean(state.args.goal_kind, belief.params), (0, 1), value=1.0)  # [M, n * K, D + 1]
    weighted, labels = (x * weight[..., None]).mT, F.one_hot(taken.flatten(1), len(PREY)).float()
    ridge = 1e-5 * torch.eye(x.shape[2], device=x.device)
    step = torch.linalg.inv(0.5 * weighted @ x + ridge)  # from a bound of the curvature: never too long (Boehning 1992)
    probe = torch.zeros(*x.shape[::2], len(PREY), device=x.device)
    for _ in range(FIT_STEPS):
        probe -= step @ (weighted @ ((x @ probe).softmax(-1) - labels) + ridge @ probe)
    return probe


@one_thread()
@torch.no_grad()
def read_minds(run, state, transitions, probe) -> dict[str, torch.Tensor]:
    """What each learner thought before each step, each [M, T, E, ...]. `without`: the goals if nothing had been carried
    over from earlier games; `memory`: how much was"""
    script, args = run.script, state.args
    steps = type(transitions)(*(x.flatten(1, 2) for x in transitions))
    clock, views, belief = infer(run, state, steps, steps.history)
    goals = steps.oracle_id.flatten(2) if belief is None else belief.goals
    said = script.evaluate_policy(args, state.networks.policy, views, clock, steps.last_joint.long(), goals)
    found = {"policy": said[2].exp(), "value": said[3], "goal": goal_probs(run, state, steps, belief, probe)}
    if belief is not None:
        found["moa"] = expected_actions(run, state, belief, clock)
    if belief is not None and args.subgoals not in GIVEN:
        now, before = steps.history.chunk(2, -1)
        _, _, stranger = infer(run, state, steps, torch.cat([now, torch.zeros_like(before)], -1))
        found["without"] = goal_probs(run, state, steps, stranger, probe)
        found["memory"] = {"bayes": before, "hop": 0.5 + before}.get(args.subgoals, before[..., :1])
    return {name: x.unflatten(1, transitions.time.shape[1:]) for name, x in found.items() if x is not None}


# ---- The next steps


def game_rules(env, board, joint, prey_position) -> torch.Tensor:
    """The next board by the game's own rules. board [M, n, C, H, W], joint action [M, n, N], prey [M, n, P]"""
    config, n, planes = env.config, env.config.num_players, board.flatten(0, 1).flatten(2)
    prey = prey_position.flatten(0, 1).long()
    stags, hares = prey.split([config.num_stags, config.num_hares], 1)
    alive = torch.cat([planes[:, n + 1].gather(1, stags), planes[:, n + 2].gather(1, hares)], 1) > 0
    players, walls = planes[:, :n], planes[:, n].contiguous()
    clock = torch.zeros(len(planes), dtype=torch.int32, device=env.device)
    state = game.State(players.argmax(2).int(), players.amax(2) > 0, prey.int(), alive, walls, clock, clock - 1)
    after, _, _, _ = env.transition(state, joint.flatten(0, 1))
    return env.observe(after)[:, 0].view_as(board)


@torch.no_grad()
def look_ahead(run, state, transitions, shown, steps_ahead: int, samples: int | None) -> tuple[torch.Tensor, int]:
    """Rolls MOA and the world model (if there is none: the game's rules) forward from the steps shown, bool [T, B]. A
    sample draws the co-players' subgoals once and keeps them, as a search does. -> how many samples see each player on
    each cell (the last one: gone) [M, T, E, steps, N, H*W + 1] in ego order; samples"""
    script, args, env, networks, config = run.script, state.args, state.env, state.networks, state.env.config
    flat = type(transitions)(*(x.flatten(1, 2) for x in transitions))
    present = flat.board[:, :, 0].flatten(2).amax(2) > 0
    asked = present & state.seats.per_learner(shown.T).mT.flatten(1)  # [M, T*E]
    order = asked.byte().argsort(dim=1, descending=True, stable=True)[:, : int(asked.sum(1).max())]  # [M, n]
    if samples is None:
        affordable = CELLS // (order.numel() * steps_ahead * (config.num_cells + 32))
        samples = 128 if env.device.type == "cuda" else min(128, max(8, 1 << max(1, affordable).bit_length() - 1))
    counts_shape = (*asked.shape, steps_ahead, config.num_players, config.num_cells + 1)
    counts = torch.zeros(counts_shape, dtype=torch.int32, device=env.device)
    learner = torch.arange(len(order), device=env.device)[:, None]
    for rows in order.split(max(1, ROWS // samples // len(order)), 1):

        def repeat(x, n=rows.shape[1]):  # [M, n * k, ...] -> [M, n * samples * k, ...]
            return x.unflatten(1, (n, -1)).repeat_interleave(samples, 1).flatten(1, 2)

        start = type(flat)(*(x[learner, rows] for x in flat))
        clock, views, belief = infer(run, state, start, start.history)
        start, belief = (type(fields)(*map(repeat, fields)) for fields in (start, belief))
        clock, views, board, last_joint = repeat(clock), [*map(repeat, views)], start.board, start.last_joint.long()
        noise = script.goal_noise(args, *belief.params.shape[:2], device=env.device)
        for step in range(steps_ahead):
            own = script.evaluate_policy(args, networks.policy, views, clock, last_joint, belief.goals)[2]
            others = script.predict_actions(args, networks, belief, clock, noise)
            last_joint = game.sample(torch.cat([own[:, :, None], others], 2).exp())
            if networks.world is None:
                board = game_rules(env, board, last_joint, start.prey_position)
            else:
                board = script.predict_step(args, config, networks.world, board, last_joint, start.seat)[0]
            players = board[:, :, : config.num_players].flatten(3)
            gone = (players.amax(3, keepdim=True) == 0).to(players.dtype)
            seen = torch.cat([players, gone], 3).unflatten(1, (-1, samples))
            counts[learner, rows, step] = seen.sum(2, dtype=torch.int32)
            clock = clock + 1 / config.final_time
            views = script.entity_views(args, env, board, start.prey_position)
            entities, walls, legal = (x[:, :, 1:].flatten(1, 2) for x in views)
            belief = belief._replace(entities=entities, walls=walls, legal=legal)
            if args.subgoals == "actions":
                belief = script.infer_opponents(args, env, networks, views, clock, start.history, start.oracle_id)
    return counts.unflatten(1, transitions.time.shape[1:]), samples


# ---- The page


def by_seat(state, name: str, x) -> np.ndarray:
    """[M, T, E, ...] -> [T, B, N, ...], nothing where no learner sits. What is about the players in ego order (`ahead`;
    without oneself: ABOUT_OTHERS) -> by seat too, nothing about oneself"""
    nothing = torch.zeros((), dtype=x.dtype, device=x.device)
    x = state.seats.to_seats(x.movedim(1, -1), nothing).movedim(-1, 0)
    if name in ABOUT_OTHERS:
        x = torch.cat([torch.zeros_like(x[:, :, :, :1]), x], 3)
    if name == "ahead":
        x = x.transpose(3, 4)  # [T, B, observer, N, steps, H*W + 1]
    if name in (*ABOUT_OTHERS, "ahead"):
        x = state.env.ego_to_seats(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    return x.cpu().numpy()


def game_data(names: list[str], seen: dict[str, np.ndarray]) -> dict:
    """A whole game as everybody can see it; seen [T, ...]: before each step, and `final_`: after it"""
    shown = {
        name: np.concatenate([x, seen[f"final_{name}"][-1:]]) for name, x in seen.items() if f"final_{name}" in seen
    }
    actions, taken = seen["actions"].tolist(), [None] * len(seen["kinds"][0])
    for step, seat in np.argwhere(shown["present"][:-1] & ~shown["present"][1:]).tolist():
        taken[seat] = {"step": step, "prey": "stag" if actions[step][seat] == game.HUNT_STAG else "hare"}
    found = {"names": ["learner" if kind < 0 else names[kind] for kind in seen["kinds"][0]], "taken": taken}
    found |= {"prey": shown["prey_position"][0], "walls": np.flatnonzero(shown["walls"][0]), "actions": actions}
    found |= {"position": np.where(shown["present"], shown["position"], -1), "alive": shown["prey_alive"].astype(int)}
    return found | {"time": shown["time"], "returns": shown["returns"], "probs": seen["probs"]}


def heat(counts: np.ndarray) -> np.ndarray:
    """[H*W + 1] -> cell, count, cell, count, ... where there are any"""
    cells = np.flatnonzero(counts)
    return np.stack([cells, counts[cells]], 1).flatten()


def mind_data(position: np.ndarray, minds: dict[str, np.ndarray], seat: int) -> dict[str, list]:
    """What the learner in `seat` thought in a game, step by step; minds [T, N, ...]. None where it, or the co-player
    that it is about, was not on the board"""
    found = {name: [None] * len(x) for name, x in minds.items()}
    for t, here in enumerate(position[:-1]):
        others = [j for j, cell in enumerate(here) if cell >= 0 and j != seat]
        for name, x in minds.items():
            if here[seat] < 0:
                continue
            if name == "ahead":
                found[name][t] = [[heat(counts) for counts in player] for player in x[t, seat]]
            elif name in ABOUT_OTHERS:
                found[name][t] = [x[t, seat, j] if j in others else None for j in range(len(here))]
            else:
                found[name][t] = x[t, seat]
    return found


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


def inspect_run(run, seats: str | None, games=8, places=2, steps_ahead=4, samples=None, seed=1) -> dict:
    """Plays, and asks. -> all that the page shows"""
    config = run.args.config
    table = seats_of(run, seats)
    sitting = [seat for seat, name in enumerate(table) if name == "learner"]
    places = min(places, games)
    wanted = [math.ceil((games - place) / places) for place in range(places)]
    state = seat_learners(run, table, seed, num_envs=places)
    args, networks = state.args, state.networks
    transitions, seen, minds = record_games(run, state, wanted)
    kind, categories = goal_names(args)
    probed = networks.inference is not None and kind == "probe of g"
    probe = fit_probe(run, table, seed) if probed else None
    minds |= read_minds(run, state, transitions, probe)
    data = {"run": run.path.parent.name, "script": Path(run.script.__file__).name, "setting": config.setting}
    data |= {"method": args.method, "subgoals": args.subgoals, "seats": table, "seed": seed, "gamma": args.gamma}
    data |= {"height": config.height, "width": config.width, "stags": config.num_stags, "digits": DIGITS}
    data |= {"final_time": config.final_time, "actions": game.ACTION_NAMES, "sprites": game.SPRITES, "ink": game.INK}
    data["goal"] = {"kind": kind, "names": categories, "probed": probed} if "goal" in minds else None
    data["carried"] = run.script.history_decay(args) if "memory" in minds else 0
    data["search"] = data["ahead"] = None
    if getattr(args, "planner", "none") != "none":
        simulations = game.NUM_ACTIONS if args.planner == "one-step" else args.num_simulations
        data["search"] = {"planner": args.planner, "simulations": simulations, "trees": args.num_trees}
    if networks.moa is not None:
        shown = seen["done"].cumsum(0) - seen["done"].long() < torch.tensor(wanted, device=state.env.device)
        minds["ahead"], samples = look_ahead(run, state, transitions, shown, steps_ahead, samples)
        model = "the game's own rules" if networks.world is None else "its world model"
        data["ahead"] = {"steps": steps_ahead, "samples": samples, "model": model}
    minds = {name: by_seat(state, name, x) for name, x in minds.items()}
    seen = {name: x.cpu().numpy() for name, x in seen.items()}
    data["games"] = []
    for place, number in enumerate(wanted):
        ends = np.flatnonzero(seen["done"][:, place])[:number].tolist()
        for first, last in zip([0, *(end + 1 for end in ends)], ends, strict=False):
            steps = slice(first, last + 1)
            shown = game_data(state.seats.names, {name: x[steps, place] for name, x in seen.items()})
            thoughts = {name: x[steps, place] for name, x in minds.items()}
            shown["minds"] = {seat: mind_data(shown["position"], thoughts, seat) for seat in sitting}
            data["games"].append(shown | {"place": place})
    return plain(data)


def write_page(path: str | Path, data: dict) -> int:
    """-> bytes"""
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    Path(path).write_text(TEMPLATE.read_text().replace("{{DATA}}", text))
    return Path(path).stat().st_size


def main(args: Args) -> dict[str, float]:
    """-> bytes of the file"""
    run = args.run
    beside = run.path.parent / f"inspect_{'-'.join(seats_of(run, args.seats))}.html"
    out = beside if args.out is None else Path(args.out)
    game.refuse(not out.parent.is_dir(), f"--out {out}: there is no folder {out.parent}")
    check_writable(out)
    data = inspect_run(run, args.seats, args.games, args.places, args.steps_ahead, args.samples, args.seed)
    size = write_page(out, data)
    print(f"{run.args.config.setting}, {run.path}: {len(data['games'])} games, {size / 1e6:.2f} MB")
    print(f"wrote {out}; open it in a browser")
    return {"bytes": size}
