"""Tiny experiments of hopplus_ppo.py, and what they saw and did"""

import hopplus_ppo as hop
from stag_hunt_env import copy_state, seats_table

import torch
from helpers import TINY_FLAGS

CPU = torch.device("cpu")


def make_args(method="hopplus", **changes):
    return hop.make_args(method, "cpu", **{**TINY_FLAGS, **changes})


def make_state(method="hopplus", watch=False, **changes):
    args = make_args(method, **changes)
    seeds = list(range(args.seed, args.seed + args.num_seeds))
    table = seats_table(args.seats, args.config.num_players)
    return hop.make_train_state(args, [table] * len(seeds), seeds, CPU, watch=watch)


def play(state, num_steps):
    return hop.rollout(state.args, state.env, state.seats, state.networks, state.rollout_state, num_steps)


def train(state):
    """One iteration that trains everything"""
    return hop.train_iteration(state, True, True)


def one_step(transitions, t):
    """[M, T, E, ...] -> [M, E, ...]"""
    return hop.Transitions(*(x[:, t] for x in transitions))


def views(state, steps):
    """steps [M, n, ...] as everybody sees them"""
    return hop.entity_views(state.args, state.env, steps.board, steps.prey_position)


@torch.no_grad()
def infer(state, steps, history):
    clock = steps.time / state.env.config.final_time
    given = (state.args, state.env, state.networks, views(state, steps), clock, history, steps.oracle_id)
    return hop.infer_opponents(*given)


def read_inputs(config, inputs, goal_size=TINY_FLAGS["goal_dim"]):
    """What a policy read, taken apart again: board, clock, last joint action, subgoals"""
    n, stags, hares, cells = config.num_players, config.num_stags, config.num_hares, config.num_cells
    sizes = [n + stags + hares, cells if config.max_wall_pieces else 1, 1, 7 * n, (n - 1) * goal_size]
    entities, walls, clock, acts, goals = inputs.split(sizes, -1)
    assert (entities == entities.round()).all() and (acts.unflatten(-1, (n, 7)).sum(-1) == 1).all()
    board = torch.zeros(*inputs.shape[:-1], n + 3, cells + 1, dtype=torch.uint8)  # the last cell: not there
    for i, plane in enumerate([*range(n), *[n + 1] * stags, *[n + 2] * hares]):
        board[..., plane, :].scatter_(-1, entities[..., i, None].long(), 1)
    board = board[..., :-1]
    board[..., n, :] = walls
    board, acts = board.unflatten(-1, (config.height, config.width)), acts.unflatten(-1, (n, 7))
    return {"board": board, "clock": clock[..., 0], "last_joint": acts.argmax(-1), "goals": goals}


class Watched:
    """A network that also notes what it is given wherever it learns: (method, inputs)"""

    def __init__(self, stacked):
        self.stacked = stacked
        self.given = []

    def __call__(self, *inputs, method="forward"):
        if torch.is_grad_enabled():
            self.given.append((method, inputs))
        return self.stacked(*inputs, method=method)

    def __getattr__(self, name):
        return getattr(self.stacked, name)


def watch_networks(state, *names):
    """-> the networks of these names, each Watched from now on"""
    watched = {name: Watched(getattr(state.networks, name)) for name in names}
    state.networks = state.networks._replace(**watched)
    return tuple(watched.values())


def enlarge_moa(state, factor=100.0):
    """Untrained, it says the same whatever it reads: its head begins with tiny weights."""
    state.networks.moa.params["head.4.weight"].data.mul_(factor)


def recorded(state, function):
    """What function() returns, and what the game saw: [(state before, actions, reward, done, players)], by seat"""
    log, step = [], state.env.step

    def watched(actions):
        before, kinds = copy_state(state.env.state), state.seats.kinds.clone()
        results = step(actions)
        log.append((before, actions.clone(), results[1].clone(), results[3].clone(), kinds))
        return results

    state.env.step = watched
    try:
        return function(), log
    finally:
        del state.env.step
