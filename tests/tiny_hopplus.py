"""Tiny experiments of hopplus_ppo.py, and what they saw and did"""

import dataclasses

import hopplus_ppo as hop
from stag_hunt_env import copy_state, seats_table

import torch
from helpers import TINY_FLAGS

CPU = torch.device("cpu")


def make_args(method="hopplus", **changes):
    return hop.make_args(method, "cpu", **{**TINY_FLAGS, **changes})


def seeds_and_tables(args):
    seeds = list(range(args.seed, args.seed + args.num_seeds))
    table = seats_table(args.seats, args.config.num_players)
    return seeds, [table] * len(seeds)


def make_state(method="hopplus", **changes):
    args = make_args(method, **changes)
    seeds, tables = seeds_and_tables(args)
    return hop.make_train_state(args, tables, seeds, CPU)


def add_moa_prior(state):
    """The network that exists in pretraining only"""
    seeds = list(range(len(state.networks.policy)))
    networks = hop.make_networks(state.args, seeds, CPU, pretraining=True)
    state.networks = state.networks._replace(moa_prior=networks.moa_prior)


def make_watched(method="hopplus", **changes):
    """A state whose own games are those of the pretraining: rule-based players play, one learner per seed looks on"""
    state = make_state(method, share_parameters=True, **changes)
    seeds, tables = seeds_and_tables(state.args)
    hop.seed_everything(seeds, 0, stream=2)
    games = hop.Games(state.args, tables, CPU, watch=True)
    networks = hop.make_networks(state.args, [100 * seed for seed in seeds], CPU, pretraining=True)
    return dataclasses.replace(state, games=games, networks=networks)


def play(state, num_steps):
    return hop.rollout(state.args, state.games, state.networks, num_steps)


def train(state):
    """One iteration that trains everything"""
    return hop.train_iteration(state)


def one_step(transitions, t):
    """[M, T, E, ...] -> [M, E, ...]"""
    return hop.Transitions(*(x[:, t] for x in transitions))


def views(state, steps):
    """steps [M, n, ...] as everybody sees them"""
    return hop.entity_views(state.games.env, steps.board, steps.walls)


@torch.no_grad()
def infer(state, steps, history):
    env = state.games.env
    clock = steps.time / env.config.final_time
    given = (state.args, env, state.networks, views(state, steps), clock, history)
    return hop.infer_opponents(*given)


def encode(state, windows):
    """Histories [M, T, G, K, 2 * hidden] before each step of windows [M, T, G, ...], from that of the first step on"""
    return hop.encode_history(state.args, state.games.env, state.networks, windows).history


def on_board(config, cells):
    """bool [...]: these cells are on the board"""
    return cells < config.num_cells


def co_players_there(windows, config):
    """bool [..., K]: which co-players are on the board"""
    return on_board(config, windows.board[..., 1 : config.num_players])


def read_inputs(config, inputs, goal_size=TINY_FLAGS["goal_dim"]):
    """What a policy read, taken apart again: board, walls, clock, last joint action, subgoals"""
    players = config.num_players
    walls_size = config.num_cells if config.max_wall_pieces else 1
    sizes = [players + config.num_stags + config.num_hares, walls_size, 1, 7 * players, (players - 1) * goal_size]
    board, walls, clock, acts, goals = inputs.split(sizes, -1)
    acts = acts.unflatten(-1, (players, 7))
    assert (board == board.round()).all() and (acts.sum(-1) == 1).all()
    return {
        "board": board.to(torch.uint8),
        "walls": walls.to(torch.uint8),
        "clock": clock[..., 0],
        "last_joint": acts.argmax(-1),
        "goals": goals,
    }


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
    env, seats = state.games.env, state.games.seats
    log, advance = [], env.advance

    def watched(actions):
        before, kinds = copy_state(env.state), seats.kinds.clone()
        reward, present_before, done = advance(actions)
        log.append((before, actions.clone(), reward.clone(), done.clone(), kinds))
        return reward, present_before, done

    env.advance = watched
    try:
        return function(), log
    finally:
        del env.advance
