"""Frozen learners of other runs as co-players: `adapt.py --sets learned` seats them.

They act by their policy and remember earlier games as they did in training. A seat is taken by the
learner that was trained in it, or by its run's first; the seeds of a run take turns.
"""

import dataclasses
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stag_hunt_env as game
from evaluation import runs
from evaluation.runs import Run

import torch
from torch.nn import functional as F


def load_others(texts: tuple[str, ...], device: str, config: game.StagHuntConfig) -> dict[str, Run]:
    """--others, each NAME=FOLDER -> name -> run"""
    others = {}
    for text in texts:
        name, _, folder = text.partition("=")
        taken = not folder or name in ("learner", "mixed", "switching", *game.PLAYER_PROBS, *others)
        runs.refuse(taken, f"--others {text}: it must be NAME=FOLDER, with a name of its own")
        others[name] = run = runs.load_run(folder, None, device)
        differ = [f"{key} {x}" for key, x in vars(run.args.config).items() if x != getattr(config, key)]
        runs.refuse(differ != [], f"--others {text}: trained in another game, {', '.join(differ)}")
        hop = getattr(run.args, "subgoals", "") == "hop"
        runs.refuse(hop, f"--others {text}: learners of --method hop cannot be co-players")
    return others


def sets_of(names: list[str]) -> list[list[str]]:
    """Three of each run, and mixtures of neighbours"""
    sets = [[name] * 3 for name in names]
    if len(names) == 2:
        first, second = names
        sets += [[first, first, second], [first, second, second]]
    mixtures = len(names) if len(names) > 3 else len(names) // 3
    return sets + [(names + names)[start : start + 3] for start in range(mixtures)]


def seat_beside(run: Run, tables, numbers, others: dict[str, Run], **changes):
    """As runs.seat_learners, where others' learners may sit in the tables"""
    stand_ins = [["random" if name in others else name for name in table] for table in tables]
    state = runs.seat_learners(run, stand_ins, numbers, **changes)
    sitting = {name: run for name, run in others.items() if any(name in table for table in tables)}
    if sitting:
        groups = [Group(run, state, name, tables) for name, run in sitting.items()]
        state.games.seats = LearnedSeats(state.games.seats, groups)
    return state


class Group:
    """Learners of one run, in all seats of those games where one sits. rows [b]: which games; sits
    [b, N, 1]: where they do. The blocks of tables take turns among as many of its seeds as fit"""

    def __init__(self, run: Run, state, name: str, tables):
        self.script = run.script
        device = state.device
        sits = torch.tensor([[x == name for x in table] for table in tables], device=device)
        blocks = sits.any(1).nonzero()[:, 0]
        seeds = math.gcd(len(blocks), run.args.num_seeds)
        blocks = blocks.view(-1, seeds).T.flatten()  # those of a seed one after another
        games = torch.arange(state.env.num_envs, device=device).view(len(tables), -1)
        self.rows = games[blocks].flatten()
        self.sits = sits[self.rows // games.shape[1]][..., None]
        seats = range(len(tables[0]))
        numbers = [runs.learner_number(run, seed, seat) for seed in range(seeds) for seat in seats]
        changes = {"num_envs": len(self.rows) // seeds, "imagination": False, "planner": "none"}
        self.state = runs.seat_learners(run, [["learner"] * len(seats)] * seeds, numbers, **changes)
        self.recurrent = not hasattr(run.script, "perceive")  # ppo_gru.py

    @torch.no_grad()
    def probs(self, state: game.State):
        """State of their games -> [b, N, 7]: what they would do"""
        games = self.state.games
        if self.recurrent:
            agent = self.state.networks["policy"]
            _, _, log_probs, _, self.next_state = self.script.act(agent, games, state)
            return games.seats.to_seats(log_probs.exp())
        situation = {
            "board": games.seats.to_learners(games.boards(state)),
            "clock": games.seats.per_learner(games.env.clock(state)),
            "last_joint": games.last_joint,
            "first_hunt": games.seats.per_learner(state.first_hunt),
            "history": games.history,
        }
        mind = self.script.perceive(self.state, situation)
        self.mind = self.script.decide(self.state, mind)
        return games.seats.to_seats(self.mind["log_probs"].exp())

    @torch.no_grad()
    def update(self, actions, payoff, done) -> None:
        """What they remember of a step, by seat: actions and payoff [B, N], done [B]"""
        args, games = self.state.args, self.state.games
        actions, payoff, done = (x[self.rows] for x in (actions, payoff, done))
        joint = games.seats.to_learners(games.env.seats_to_ego(actions))
        done = games.seats.per_learner(done)
        if self.recurrent:
            payoff = games.seats.to_learners(payoff)
            forget = done & (not args.keep_state)
            self.script.remember(games, self.next_state, joint, payoff, forget)
            return
        joint = joint.byte()
        if args.has_models:
            games.history.copy_(self.script.update_history(self.state, self.mind, joint, done))
        games.last_joint.copy_(joint.masked_fill(done[..., None], game.STAY))


@dataclasses.dataclass
class LearnedSeats:
    """The same seats, some of them filled by groups. What is done is drawn here already: the groups'
    memory needs it"""

    seats: game.Seats
    groups: list[Group]

    def __getattr__(self, name):
        return getattr(self.seats, name)

    def action_probs(self, state, learner_probs=None):
        probs = self.seats.action_probs(state, learner_probs)
        for group in self.groups:
            theirs = group.probs(game.State(*(x[group.rows] for x in state)))
            theirs = torch.where(group.sits, theirs, probs[group.rows])
            probs = probs.index_copy(0, group.rows, theirs)
        self.before = game.State(*(x.clone() for x in state))
        self.actions = game.sample(probs)
        return F.one_hot(self.actions, game.NUM_ACTIONS).float()

    def update(self, done):
        self.seats.update(done)
        _, payoff, _, _ = self.seats.env.transition(self.before, self.actions)
        for group in self.groups:
            group.update(self.actions, payoff, done)
