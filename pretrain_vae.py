"""Pretrains the subgoal VAE, the subgoal inference and the model of the others' actions (MOA) on games of
rule-based players, and measures them like a classifier.

    python pretrain_vae.py                                            # 4x4, continuous subgoals, both losses
    python pretrain_vae.py --goal-kind discrete --goal-dim 8 --loss moa
    python pretrain_vae.py --num-seeds 5 --height 8 --width 8 --population nearest_stag,nearest_hare
    python pretrain_vae.py --resume runs/RUN/checkpoint.pt
    python hopplus_ppo.py --vae-checkpoint runs/RUN/checkpoint.pt

A sample is one step of one player j that was on the board: (its view of the game so far) -> its action. Two predictors
are trained side by side: one infers the subgoal g from the current state alone, one from the whole game so far. Beside
them stand two exact ceilings, made from the players' known probabilities: what can be predicted if j's kind is known,
and if it has to be inferred from the same history by Bayes' rule. `docs/pretrain_vae.md` explains every figure.
Axes: S seeds (one model each), R trajectories of T steps, n samples, N seats, P prey, H W board, A actions, D subgoal.
"""

import contextlib
import csv
import dataclasses
import fcntl
import functools
import hashlib
import io
import itertools
import json
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Literal, NamedTuple

import stag_hunt_env as game
from stag_hunt_env import NUM_ACTIONS, STAY, Count, NonNegative, Positive, StagHuntConfig, StagHuntEnv, Whole

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from scipy import stats
from torch import nn
from torch.func import stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

FORMAT = "pretrain_vae.py 8"  # of a checkpoint
KEYS = {  # in it
    "args": dict,
    "device": str,
    "step": int,
    "networks": dict,
    "optimizer": dict,
    "seconds": float,
    "folders": list,
    "must_match": dict,
}
MAY_CHANGE = ("epochs", "log_details", "run_dir", "device", "resume")
TAGS = {  # the four predictors, and their names in TensorBoard and metrics.jsonl
    "state only": "moa_prior",
    "with history": "moa",
    "ceiling: Bayes from history": "moa/bayes",
    "ceiling: kind known": "moa/ceiling",
}
PREDICTORS = tuple(TAGS)
PER_ACTION = ("count", "share", "precision", "recall", "f1")
DETAILS = re.compile(rf".*/({'|'.join(PER_ACTION)})/")  # logged only with --log-details


@dataclasses.dataclass
class RunArgs:
    exp_name: str = Path(__file__).stem
    """first part of the run's name"""
    seed: Whole = 1
    """seed of the first experiment; the others count up from it, but are not what --seed 2, 3, ... alone would be"""
    num_seeds: Count = 1
    """S, experiments side by side, each with its own games, weights and TensorBoard run"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train; auto: on the GPU if there is one"""
    run_dir: str = "runs"
    """folder in which the runs' folders are made"""
    resume: str | None = None
    """continue the run of this checkpoint or run folder, bit for bit, with its flags; more --epochs extend it"""
    log_details: bool = False
    """log every metric, not only the main ones"""


@dataclasses.dataclass
class DataArgs:
    population: str = ",".join(game.POPULATION)
    """who plays the games: each seat of each game draws one of these"""
    num_samples: Count = 100_000
    """samples to train on, at least"""
    held_out_games: Count = 1000
    """further games to measure on"""
    augment: bool = True
    """show each game in a random one of the board's symmetries (8 if it is square, else 4)"""


@dataclasses.dataclass
class OpponentArgs:
    loss: Literal["recon", "moa", "both"] = "both"
    """what shapes the subgoals besides KL: reconstruction of the state, cross-entropy of the action, or both"""
    goal_kind: Literal["continuous", "discrete"] = "continuous"
    """Gaussian subgoals, or categories drawn by straight-through Gumbel-softmax"""
    goal_dim: Count = 16
    """D, the size of a subgoal (discrete: the number of categories)"""
    subgoal_hidden: Count = 64
    """width of the subgoal networks and the MOA"""
    kl_coef: NonNegative = 1e-3
    """weight of the KL terms"""
    epochs: Count = 15
    """passes over the samples"""
    batch_size: Count = 128
    """trajectories per update and experiment"""
    learning_rate: Positive = 3e-3
    """Adam's step size at the start; falls to 0 along a cosine"""


@dataclasses.dataclass
class Args(RunArgs, DataArgs, OpponentArgs):
    config: StagHuntConfig = dataclasses.field(default_factory=StagHuntConfig)


GROUPS = {"run": RunArgs, "game": StagHuntConfig, "data": DataArgs, "opponent_model": OpponentArgs}


def make_args(**changes) -> Args:
    """Complete flags; with `resume` those of the run that goes on"""
    if changes.get("resume") is None:
        return Args(**changes)
    path = game.find_checkpoint(changes["resume"], "--resume")
    return load_args(path, load_checkpoint(path)["args"], **changes)


def parse_args(words: list[str]) -> Args:
    return game.parse(Args, GROUPS, make_args(**game.early_flags(words, resume=None, device="auto")), words)


def validate(args: Args) -> StagHuntConfig:
    """Refuses wrong flags before anything is written."""
    config = args.config
    game.check_ranges(args)
    game.resolve_device(args.device)
    game.population_names(args.population)
    game.refuse(config.num_cells > 255, f"--height, --width: a board has up to 255 cells, not {config.num_cells}")
    game.refuse(args.subgoal_hidden < 2, "--subgoal-hidden must be 2 or more")
    one = args.goal_kind == "discrete" and args.goal_dim < 2
    game.refuse(one, "--goal-kind discrete needs --goal-dim 2 or more")
    return config


def memory_needs(args: Args) -> dict[str, int]:
    """Flags -> bytes that they ask for, roughly"""
    config, hidden, seeds = args.config, args.subgoal_hidden, args.num_seeds
    planes, players = math.prod(config.observation_shape), config.num_players
    table = (2 * config.height - 1) * (2 * config.width - 1) * (players + 2)  # rows of a BoardEncoder's
    needs = {"--num-samples": seeds * args.num_samples * 400}
    needs["--held-out-games"] = seeds * args.held_out_games * players * config.final_time * 400
    needs["--goal-dim"] = 24 * seeds * args.goal_dim * (args.batch_size * config.final_time + planes + hidden)
    needs["--subgoal-hidden"] = 64 * seeds * hidden * (table + 2 * planes + 4 * hidden)
    needs["--batch-size"] = seeds * args.batch_size * config.final_time * 24 * (table + 8 * hidden)
    return {f"{flag}, --num-seeds" if seeds > 1 else flag: size for flag, size in needs.items()}


# ---- Networks, each for one learner and n rows. A row never looks at another, so Stacked may split a batch.


def layer(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    """Uniform weights of variance gain^2 / inputs, no bias at the start"""
    linear = nn.Linear(inputs, outputs)
    nn.init.uniform_(linear.weight, -gain * math.sqrt(3 / inputs), gain * math.sqrt(3 / inputs))
    nn.init.zeros_(linear.bias)
    return linear


def mlp(*sizes: int, gain: float = 1.0) -> nn.Sequential:
    """Layers with ReLU between them; gain is the last one's"""
    layers = []
    for inputs, outputs in itertools.pairwise(sizes[:-1]):
        layers += [layer(inputs, outputs, math.sqrt(2)), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, layer(sizes[-2], sizes[-1], gain))


class Stacked:
    """M networks of one kind, called in one operation: inputs [M, n, ...] -> outputs [M, n, ...], in float32. Inside,
    `dtype` holds where no gradient is asked for, `train_dtype` where one is."""

    def __init__(self, make, seeds: list[int], device, dtype=torch.float32, train_dtype=torch.float32):
        networks = []
        with torch.random.fork_rng(devices=[]):
            for seed in seeds:
                torch.default_generator.manual_seed(seed)
                networks.append(make())
        stacked, _ = stack_module_state(networks)
        self.network = networks[0].to(device)  # its buffers serve all
        self.params, self.places = {}, []
        for name, p in stacked.items():
            if name.endswith("weight") and p.dim() == 3:  # of nn.Linear, which reads the transpose: slow on ARM
                p = p.mT.contiguous().mT
            self.params[name] = nn.Parameter(p.detach().to(device))
            path, _, leaf = name.rpartition(".")
            owner = self.network.get_submodule(path)._parameters
            self.places.append((owner, leaf, owner[leaf]))
        self.dtype = dtype
        self.train_dtype = train_dtype

    def __call__(self, *inputs: torch.Tensor, method: str = "forward"):
        dtype = self.train_dtype if torch.is_grad_enabled() else self.dtype
        m, n = inputs[0].shape[:2]
        params = [p.to(dtype) for p in self.params.values()]
        inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
        # On a GPU a long batch is split: as one long sum per learner, a weight's gradient leaves most of it idle.
        parts = math.gcd(n, 1 << max(1, n // 1024).bit_length() - 1) if inputs[0].is_cuda else 1
        if parts > 1:
            params = [p.repeat_interleave(parts, 0) for p in params]
            inputs = [x.reshape(m * parts, n // parts, *x.shape[2:]) for x in inputs]
        outputs = vmap(lambda *x: self.call_one(method, *x))(params, *inputs)
        return tree_map(lambda x: (x.float() if x.is_floating_point() else x).reshape(m, n, *x.shape[2:]), outputs)

    def call_one(self, method: str, params: list, *inputs):
        """One learner. As torch.func.functional_call, in half the time, and for any method."""
        for (owner, name, _), p in zip(self.places, params, strict=True):
            owner[name] = p
        outputs = getattr(self.network, method)(*inputs)
        for owner, name, own in self.places:
            owner[name] = own
        return outputs

    def __len__(self) -> int:
        return len(self.parameters()[0])

    def parameters(self) -> list[nn.Parameter]:
        return list(self.params.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.params.items()}

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        game.copy_nested_(self.state_dict(), saved)


class BoardEncoder(nn.Module):
    """A board as a list of entities (see entity_views) -> features. Each entity is looked up by its kind and its cell
    relative to the observer; what is found adds up."""

    def __init__(self, config: StagHuntConfig, hidden: int):
        super().__init__()
        n, cells, wide = config.num_players, config.num_cells, 2 * config.width - 1
        spots = (2 * config.height - 1) * wide
        row, column = np.divmod(np.arange(cells), config.width)
        spot = (row - row[:, None] + config.height - 1) * wide + column - column[:, None] + config.width - 1
        rows = spots * (n + 2) + cells + 1  # the last row stands for what is not there
        rows += -rows % 8  # a GPU reads rows faster that begin at multiples of 16 bytes
        lookup = np.full((n + 2, cells + 1, cells + 1), rows - 1)  # [kind, own cell, its cell] -> row of the table
        lookup[:, :cells, :cells] = spot + spots * np.arange(n + 2)[:, None, None]
        lookup[:, cells] = lookup[:, 0]  # an observer that has left sees the board from its first cell
        lookup[0, :cells] = spots * (n + 2) + np.arange(cells)[:, None]  # the observer: its cell on the board
        kinds = [*range(n), *[n] * config.num_stags, *[n + 1] * config.num_hares]
        self.register_buffer("lookup", torch.tensor(lookup), persistent=False)
        self.register_buffer("kind", torch.tensor(kinds), persistent=False)
        self.table = nn.Parameter(0.1 * torch.randn(rows, 2 * hidden))
        self.walls = layer(cells, 2 * hidden) if config.max_wall_pieces else None
        self.mix = mlp(2 * hidden, hidden, gain=math.sqrt(2))

    def forward(self, entities, walls):
        """int64 [n, N + P], float [n, H*W] -> [n, hidden]"""
        row = self.lookup[self.kind, entities[:, :1], entities]
        found = torch.zeros(len(row), len(self.table), dtype=self.table.dtype, device=row.device).scatter(1, row, 1.0)
        x = found @ self.table  # as a lookup, but its gradient is a product too: a lookup's is slow on a GPU
        if self.walls is not None:
            x = x + self.walls(walls)
        return self.mix(x.relu()).relu_()


class SubgoalPrior(nn.Module):
    """f_psi, a VAE: state -> distribution over subgoals; subgoal -> state"""

    def __init__(self, config: StagHuntConfig, args: Args):
        super().__init__()
        hidden = args.subgoal_hidden
        self.encoder = BoardEncoder(config, hidden)
        self.head = layer(hidden, args.goal_dim * (2 if args.goal_kind == "continuous" else 1))
        self.decoder = mlp(args.goal_dim, hidden, math.prod(config.observation_shape))

    def forward(self, entities, walls):
        return self.head(self.encoder(entities, walls))

    def reconstruct(self, goal):
        return self.decoder(goal)


class SubgoalInference(nn.Module):
    """q_phi, a CVAE after OMG: the co-player's history up to t - 1 and the state s_t -> distribution over subgoals;
    subgoal and history -> state. A history is two sums of events, of this game and of earlier ones, as Bayes' rule adds
    up evidence; their first entries count."""

    def __init__(self, config: StagHuntConfig, args: Args):
        super().__init__()
        hidden = args.subgoal_hidden
        self.encoder = BoardEncoder(config, hidden)
        self.events = mlp(hidden + NUM_ACTIONS * config.num_players, hidden, hidden)
        self.head = mlp(3 * hidden, hidden, args.goal_dim * (2 if args.goal_kind == "continuous" else 1))
        self.decoder = mlp(args.goal_dim + 2 * hidden, hidden, math.prod(config.observation_shape))

    def event(self, features, joint):
        """features [n, hidden], joint action [n, N] -> what the step adds to the history [n, hidden]"""
        acts = F.one_hot(joint, NUM_ACTIONS).flatten(1).to(features.dtype)
        return F.pad(self.events(torch.cat([features, acts], 1))[:, 1:], (1, 0), value=1.0)

    @staticmethod
    def read(history):
        """[n, 2 * hidden]: evidence grows with the number of events, its noise with the root"""
        now, before = history.chunk(2, 1)
        return torch.cat([now / (1 + now[:, :1]).sqrt(), before / (1 + before[:, :1]).sqrt()], 1)

    def forward(self, features, history):
        return self.head(torch.cat([features, self.read(history)], 1))

    def reconstruct(self, goal, history):
        return self.decoder(torch.cat([goal, self.read(history)], 1))


class ActionModel(nn.Module):
    """MOA, pi_omega: state seen from j, clock and subgoal of j -> log-probabilities of j's action"""

    def __init__(self, config: StagHuntConfig, args: Args):
        super().__init__()
        hidden = args.subgoal_hidden
        self.encoder = BoardEncoder(config, hidden)
        self.head = mlp(hidden + 8 + args.goal_dim, hidden, hidden, NUM_ACTIONS, gain=0.01)

    def forward(self, entities, walls, clock, goal, legal):
        clock = F.pad(clock[:, None], (0, 7))  # as in BoardEncoder
        logits = self.head(torch.cat([self.encoder(entities, walls), clock, goal], 1))
        return logits.float().masked_fill(~legal, -1e9).log_softmax(1)


def goal_mean(kind: str, params):
    return params.chunk(2, -1)[0] if kind == "continuous" else params.softmax(-1)


def goal_noise(args: Args, *shape, device):
    """[*shape, D]: standard normal, or Gumbel for discrete subgoals"""
    if args.goal_kind == "continuous":
        return torch.randn(*shape, args.goal_dim, device=device)
    return -torch.log(-torch.log(torch.rand(*shape, args.goal_dim, device=device).clamp(1e-6, 1 - 1e-6)))


def sample_goal(kind: str, params, noise):
    """Reparameterised, or straight-through Gumbel-softmax of temperature 0.5"""
    if kind == "continuous":
        mean, log_var = params.chunk(2, -1)
        return mean + noise * (0.5 * log_var.clamp(-8, 4)).exp()
    soft = ((params + noise) / 0.5).softmax(-1)
    return F.one_hot(soft.argmax(-1), soft.shape[-1]) + soft - soft.detach()


def goal_kl(kind: str, q, p):
    """KL(q || p) [...] of distributions [..., parameters]"""
    if kind == "discrete":
        return (q.softmax(-1) * (q.log_softmax(-1) - p.log_softmax(-1))).sum(-1)
    (q_mean, q_log_var), (p_mean, p_log_var) = q.chunk(2, -1), p.chunk(2, -1)
    q_log_var, p_log_var = q_log_var.clamp(-8, 4), p_log_var.clamp(-8, 4)
    ratio = (q_log_var - p_log_var).exp() + (q_mean - p_mean).square() / p_log_var.exp()
    return 0.5 * (ratio - 1 - q_log_var + p_log_var).sum(-1)


def make_models(args: Args, config: StagHuntConfig, seeds: list[int], device) -> dict[str, Stacked]:
    """One of each per seed: f_psi, q_phi, MOA given q_phi's subgoal, MOA given f_psi's subgoal of the present state"""
    kinds = {"prior": SubgoalPrior, "inference": SubgoalInference, "moa": ActionModel, "moa_prior": ActionModel}
    return {
        name: Stacked(functools.partial(kind, config, args), [4 * seed + number for seed in seeds], device)
        for number, (name, kind) in enumerate(kinds.items())
    }


# ---- Data and losses


class Trajectories(NamedTuple):
    """R players' games of T steps, each seen by that player j, in its ego order. All seeds: [S, R, T, ...]"""

    entities: torch.Tensor  # uint8 [R, T, N + P] cells of the players, stags and hares; H*W: not there
    walls: torch.Tensor  # uint8 [R, T, H*W] (one number where the game has none)
    joint: torch.Tensor  # uint8 [R, T, N]
    legal: torch.Tensor  # bool [R, T, 7] j's legal actions
    acted: torch.Tensor  # bool [R, T] j was on the board before the step, and the game not over
    bayes: torch.Tensor  # [R, T, 7] the best prediction of j's action from what it did before
    known: torch.Tensor  # [R, T, 7] j's own probabilities
    prey: torch.Tensor  # int64 [R] what j ended with: 0 nothing, 1 a stag, 2 a hare


def play_trajectories(env: StagHuntEnv, population: str) -> Trajectories:
    """One game in each place, seen by each of its players: R = games * N"""
    config, n = env.config, env.config.num_players
    seats = game.Seats(env, [["mixed"] * n], population=population, redraw="never", remember=True)
    taken = torch.zeros(env.num_envs, n, dtype=torch.int64, device=env.device)
    state, steps = env.initial_state(), []
    for _ in range(config.final_time):
        known, bayes = seats.action_probs(state), seats.posterior_probs()
        actions = game.sample(known)
        after, _, acted, done = env.transition(state, actions)
        seats.update(actions, acted, done)
        players = env.seats_to_ego(torch.where(state.present, state.position, config.num_cells))
        prey = torch.where(state.prey_alive, state.prey_position, config.num_cells)[:, None].expand(-1, n, -1)
        walls = state.walls[:, None, : None if config.max_wall_pieces else 1].expand(-1, n, -1)
        joint = env.seats_to_ego(torch.where(acted, actions, STAY))
        seen = torch.cat([players, prey], 2).byte(), walls, joint.byte(), env.legal_actions(state)
        steps.append((*seen, acted, bayes, known))
        taken = torch.where(state.present & ~after.present, actions - STAY, taken)  # hunting a stag is 5, a hare 6
        state = after
    fields = (torch.stack(field, 2).flatten(0, 1) for field in zip(*steps, strict=True))
    return Trajectories(*fields, taken.flatten())


def collect_trajectories(args: Args, config: StagHuntConfig, seed: int, device) -> list[Trajectories]:
    """To train on: at least --num-samples samples. To measure on: --held-out-games other games"""
    torch.manual_seed(seed)
    env = StagHuntEnv(config, 256, device, seed)
    train = play_trajectories(env, args.population)
    while int(train.acted.sum()) < args.num_samples:
        train = tree_map(lambda *x: torch.cat(x), train, play_trajectories(env, args.population))
    rows = int((train.acted.sum(1).cumsum(0) < args.num_samples).sum()) + 1
    others = [play_trajectories(env, args.population) for _ in range(math.ceil(args.held_out_games / env.num_envs))]
    others = tree_map(lambda *x: torch.cat(x)[: args.held_out_games * config.num_players], *others)
    return [Trajectories(*(x[:rows] for x in train)), others]


def symmetries(config: StagHuntConfig, device) -> tuple[torch.Tensor, torch.Tensor]:
    """cells [8 or 4, H*W + 1] and actions [8 or 4, 7] under the board's symmetries"""

    def turned(height, width, flip, turns):  # [H*W] where each cell goes
        grid = np.arange(height * width).reshape(height, width)
        return np.argsort(np.rot90(np.flip(grid, 1) if flip else grid, turns).flatten())

    height, width = config.height, config.width
    around = [1, 7, 3, 5]  # up, down, left, right of the middle of a 3x3 board
    kinds = [(flip, turns) for flip in (False, True) for turns in ((0, 1, 2, 3) if height == width else (0, 2))]
    cells = [np.append(turned(height, width, *kind), height * width) for kind in kinds]
    actions = [[*map(around.index, turned(3, 3, *kind)[around]), *range(STAY, NUM_ACTIONS)] for kind in kinds]
    return torch.tensor(np.stack(cells), device=device), torch.tensor(actions, device=device)


class Batch(NamedTuple):
    """n samples of B trajectories of T steps, packed: only steps at which j acted, and a few to fill up. [S, n, ...]"""

    entities: torch.Tensor  # int64 [S, n, N + P]
    walls: torch.Tensor  # float [S, n, H*W]
    joint: torch.Tensor  # int64 [S, n, N]
    legal: torch.Tensor  # bool [S, n, 7]
    weight: torch.Tensor  # float [S, n] 1 where j acted, else 0
    clock: torch.Tensor  # float [S, n]
    place: torch.Tensor  # int64 [S, n] trajectory * T + step
    last: torch.Tensor  # int64 [S, n] which sample is the last of the same trajectory: s^g
    shape: tuple[int, int]  # B, T


def make_batch(config: StagHuntConfig, data: Trajectories, index, samples: int, symmetry=None) -> Batch:
    """data [S, R, ...]; index [S, B] of trajectories; samples n; optionally symmetry (cells, actions, which [S, B])"""
    seed, steps = torch.arange(len(index), device=index.device)[:, None], data.acted.shape[2]
    acted = data.acted[seed, index].flatten(1)
    place = acted.int().argsort(dim=1, descending=True, stable=True)[:, :samples]
    trajectory, step = place // steps, place % steps
    row = index.gather(1, trajectory)
    entities, walls, joint, legal = (x[seed, row, step] for x in data[:4])
    entities, walls, joint = entities.long(), walls.float(), joint.long()
    if symmetry is not None:
        to_cell, to_action, which = symmetry
        which = which.gather(1, trajectory)
        entities, joint = to_cell[which].gather(2, entities), to_action[which].gather(2, joint)
        legal = legal.gather(2, to_action.argsort(1)[which])
        if config.max_wall_pieces:
            walls = walls.gather(2, to_cell[:, :-1].argsort(1)[which])
    number = torch.arange(samples, device=index.device).expand_as(place)
    slot = torch.zeros_like(acted, dtype=torch.int64).scatter(1, place, number)
    final = (acted * torch.arange(1, 1 + acted.shape[1], device=index.device)).unflatten(1, (-1, steps)).amax(2) - 1
    last = slot.gather(1, final.clamp(min=0).gather(1, trajectory))
    weight, clock = acted.gather(1, place).float(), step / config.final_time
    return Batch(entities, walls, joint, legal, weight, clock, place, last, (index.shape[1], steps))


def masked_mean(x, weight):
    """[M, ...] -> [M]: the mean where weight [M, ...] says that it counts"""
    return (x * weight).flatten(1).sum(1) / weight.flatten(1).sum(1).clamp(min=1e-6)


def target_planes(config: StagHuntConfig, entities, walls):
    """[M, n, N + P], [M, n, _] -> float [M, n, C * H*W]: what the decoders reconstruct"""
    one_hot = torch.eye(config.num_cells + 1, config.num_cells, device=entities.device)[entities]
    players, stags, hares = one_hot.split([config.num_players, config.num_stags, config.num_hares], 2)
    walls = walls[:, :, None] if config.max_wall_pieces else torch.zeros_like(players[:, :, :1])
    return torch.cat([players, walls, stags.sum(2, keepdim=True), hares.sum(2, keepdim=True)], 2).flatten(2)


def infer_trajectories(inference: Stacked, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """-> q_phi's parameters [S, n, _], and the histories [S, n, _] of what came before each sample"""
    features = inference(batch.entities, batch.walls, method="encoder")
    event = inference(features, batch.joint, method="event")
    place = batch.place[..., None].expand_as(event)
    grid = event.new_zeros(len(event), math.prod(batch.shape), event.shape[2]).scatter(1, place, event)
    earlier = event.new_ones(batch.shape[1], batch.shape[1]).tril(-1)  # [t, u]: event u comes before step t
    history = (earlier @ grid.unflatten(1, batch.shape)).flatten(1, 2).gather(1, place)
    history = F.pad(history, (0, history.shape[2]))  # no earlier games
    return inference(features, history), history


def action_log_probs(args: Args, moa: Stacked, batch: Batch, params, goals) -> torch.Tensor:
    """[S, n, 7], averaged over the subgoals drawn [S, n, k, D], or exactly over all categories: from straight-through
    draws alone the encoder would learn to use one category for everything"""
    log_weights = goals.new_full(goals.shape[:3], -math.log(goals.shape[2]))
    if args.goal_kind == "discrete":
        goals = torch.eye(args.goal_dim, device=params.device).expand(*params.shape, -1)
        log_weights = params.log_softmax(-1)
    k = goals.shape[2]
    inputs = [x.repeat_interleave(k, 1) for x in (batch.entities, batch.walls, batch.clock, batch.legal)]
    log_probs = moa(*inputs[:3], goals.flatten(1, 2), inputs[3]).unflatten(1, (-1, k))
    return (log_probs + log_weights[..., None]).logsumexp(2)


def vae_losses(args: Args, config: StagHuntConfig, models: dict, batch: Batch, noise) -> dict[str, torch.Tensor]:
    """Each [S], the mean over the samples of the batch; noise [2, S, n, D]. `vae` is the side that sees the state only,
    `cvae` the one with history."""
    prior = models["prior"](batch.entities, batch.walls)
    posterior, history = infer_trajectories(models["inference"], batch)
    truth = target_planes(config, batch.entities, batch.walls)
    # The hindsight subgoal s^g is the last state before j left ("final"); the prior is not moved by it.
    hindsight = prior.detach().gather(1, batch.last[..., None].expand_as(prior))
    losses = {}
    standard = torch.zeros_like(prior)
    sides = ("vae", "prior", "moa_prior", prior, standard), ("cvae", "inference", "moa", posterior, hindsight)
    for (side, decoder, moa, params, target), side_noise in zip(sides, noise, strict=True):
        goal = sample_goal(args.goal_kind, params, side_noise)
        logits = models[decoder](*([goal] if side == "vae" else [goal, history]), method="reconstruct")
        error = F.binary_cross_entropy_with_logits(logits, truth, reduction="none").mean(2)
        losses[f"recon_{side}"] = masked_mean(error, batch.weight)  # only steps at which j was on the board
        losses[f"kl_{side}"] = masked_mean(goal_kl(args.goal_kind, params, target), batch.weight)
        if args.loss == "recon":  # MOA learns too, but on subgoals that it cannot move
            params, goal = params.detach(), goal.detach()
        log_probs = action_log_probs(args, models[moa], batch, params, goal[:, :, None])
        losses[f"moa_{side}"] = masked_mean(-log_probs.gather(2, batch.joint[..., :1])[..., 0], batch.weight)
    weights = {"recon": float(args.loss != "moa"), "kl": args.kl_coef, "moa": 1.0}
    losses["total"] = sum(weights[name.split("_")[0]] * value for name, value in losses.items())
    return losses


# ---- Measuring: tables and pictures


@torch.no_grad()
def predict_probs(args: Args, config, models: dict, data: Trajectories, size: int = 512, draws: int = 8):
    """-> probabilities of the four PREDICTORS [4, S, R, T, 7], the mean subgoals of the first two [2, S, R, T, D]"""
    device, (num_seeds, num_rows, steps) = data.acted.device, data.acted.shape
    seed = torch.arange(num_seeds, device=device)[:, None]
    probs = torch.stack([torch.zeros_like(data.known)] * 2 + [data.bayes, data.known])
    goals = torch.zeros(2, *data.acted.shape, args.goal_dim, device=device)
    torch.manual_seed(0)
    for rows in torch.arange(num_rows, device=device).split(size):
        index = rows.expand(num_seeds, -1)
        batch = make_batch(config, data, index, int(data.acted[:, rows].sum((1, 2)).max().clamp(min=1)))
        row, step = index.gather(1, batch.place // steps), batch.place % steps
        prior = models["prior"](batch.entities, batch.walls)
        posterior, _ = infer_trajectories(models["inference"], batch)
        for k, (name, params) in enumerate((("moa_prior", prior), ("moa", posterior))):
            noise = goal_noise(args, *params.shape[:2], draws, device=device)
            drawn = sample_goal(args.goal_kind, params[:, :, None], noise)
            probs[k, seed, row, step] = action_log_probs(args, models[name], batch, params, drawn).exp()
            goals[k, seed, row, step] = goal_mean(args.goal_kind, params)
    return probs, goals


def classifier_metrics(probs: np.ndarray, action: np.ndarray) -> tuple[dict[str, float], np.ndarray]:
    """probs [n, 7], action [n] -> figures, confusion matrix [true, predicted]. Where actions are equally likely (within
    0.1), the prediction is split between them: else the order of the actions would decide who is right."""
    tied = probs >= probs.max(1, keepdims=True) - 0.1
    confusion = np.zeros((NUM_ACTIONS, NUM_ACTIONS))
    np.add.at(confusion, action, tied / tied.sum(1, keepdims=True))
    own, confidence, right = probs[np.arange(len(action)), action], probs.max(1), probs.argmax(1) == action
    hit, count, guessed = np.diag(confusion), confusion.sum(1), confusion.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        per_action = {"count": count, "share": count / len(action), "precision": hit / guessed, "recall": hit / count}
        per_action["f1"] = np.nan_to_num(2 * hit / (count + guessed))
    figures = {
        "top1": right.mean(),
        "top3": (np.argsort(-probs, 1, kind="stable")[:, :3] == action[:, None]).any(1).mean(),
        "nll": -np.log(np.maximum(own, 1e-12)).mean(),
        "ece": abs(np.bincount(np.minimum((np.nan_to_num(confidence) * 15).astype(int), 14), confidence - right)).sum()
        / len(action),
        "macro_f1": per_action["f1"][count > 0].mean(),
    }
    figures |= {f"{name}/{a}": per_action[name][a] for name in PER_ACTION for a in range(NUM_ACTIONS)}
    return {name: float(value) for name, value in figures.items()}, confusion


def probe(goals, prey, weight, test_goals, test_prey, updates: int = 200) -> torch.Tensor:
    """Does a linear reading of g tell which prey j will take? Fitted to goals [R, T, D], prey [R], weight [R, T]
    -> bool [R, T]: right on the test"""
    goals, prey, weight = (x.to(test_goals.device) for x in (goals, prey, weight))
    linear = layer(goals.shape[2], 3, 0.0).to(goals.device)
    scale = goals.std((0, 1)).clamp(min=1e-6)
    optimizer = torch.optim.Adam(linear.parameters(), lr=0.1)
    label = prey[:, None].expand(goals.shape[:2])
    for _ in range(updates):
        error = F.cross_entropy(linear(goals / scale).movedim(2, 1), label, reduction="none")
        optimizer.zero_grad()
        ((error * weight).sum() / weight.sum()).backward()
        optimizer.step()
    return linear(test_goals / scale).argmax(2) == test_prey[:, None]


def measure(args: Args, config: StagHuntConfig, models: dict, held_out: Trajectories, train=None):
    """-> per seed {predictor: figures}, {predictor: arrays to draw}; probes if there is something to fit them to"""
    probs, goals = predict_probs(args, config, models, held_out)
    train_goals = None if train is None else predict_probs(args, config, models, train)[1]
    tables, arrays = [], []
    for s, acted in enumerate(held_out.acted):
        action = held_out.joint[s, ..., 0].long()
        table, drawn = {}, {}
        for k, name in enumerate(PREDICTORS):
            p = probs[k, s]
            table[name], confusion = classifier_metrics(p[acted].cpu().numpy(), action[acted].cpu().numpy())
            by_step = ((p.argmax(2) == action) & acted).sum(0) / acted.sum(0)
            drawn[name] = {"confusion": confusion, "by_step": by_step.tolist()}
            if train is not None and k < 2:
                weight = train.acted[s].float()
                right = probe(train_goals[k, s], train.prey[s], weight, goals[k, s], held_out.prey[s]) & acted
                table[name]["probe_accuracy"] = float(right.sum() / acted.sum())
                drawn[name]["probe_by_step"] = (right.sum(0) / acted.sum(0)).tolist()
        tables.append(table)
        arrays.append(drawn)
    return tables, arrays


def interval(values: list[float]) -> tuple[float, float]:
    """mean and half width of its 95 % interval (Student's t over seeds)"""
    values = [v for v in values if not math.isnan(v)]
    if len(values) < 2:
        return (values[0] if values else math.nan), math.nan
    return float(np.mean(values)), float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def write_csv(path: Path, table: dict[str, dict[str, float]]) -> None:
    """A CSV with one line per metric and a column for each predictor"""
    lines = [[key, *(figures.get(key, math.nan) for figures in table.values())] for key in table["with history"]]
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([["metric", *table], *lines])


def show_table(tables: list[dict]) -> None:
    keys = ["top1", "top3", "nll", "ece", "macro_f1", *(f"recall/{a}" for a in range(NUM_ACTIONS)), "probe_accuracy"]
    print(" " * 16, *(name.rjust(30) for name in PREDICTORS), sep="")
    for key in keys:
        found = [interval([table[name].get(key, math.nan) for table in tables]) for name in PREDICTORS]
        print(key.ljust(16), *(f"{m:.4f} ± {h:.4f}".replace(" ± nan", "").rjust(30) for m, h in found), sep="")


@contextlib.contextmanager
def never_fatal(what: str):
    """Whatever goes wrong inside is reported in one line: pictures and TensorBoard never cost a run"""
    try:
        yield
    except Exception as error:
        tqdm.write(f"could not {what}: {type(error).__name__}: {error}; the run goes on")


def write_row(writer: SummaryWriter, path: Path, step: int, row: dict[str, float], details: bool) -> None:
    """To TensorBoard and metrics.jsonl. JSON has no NaN (recall of an action that nobody took, say): null"""
    row = {name: value for name, value in row.items() if details or not DETAILS.match(name)}
    finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
    try:
        with open(path, "a") as file:
            file.write(json.dumps({"steps": step, **finite}) + "\n")
    except OSError as error:
        kept = ", the last checkpoint is safe" if (path.parent / "checkpoint.pt").exists() else ""
        raise game.UserError(f"could not write {path}{kept}: {error.strerror}") from error
    with never_fatal("write to TensorBoard"):
        for name, value in row.items():
            writer.add_scalar(name, value, step)


def draw_pictures(folder: Path, writer: SummaryWriter, arrays: dict, step: int) -> None:
    """Confusion matrices, their rows summing to 1; top-1 and probe accuracy by step of the game"""
    figures = {"confusion": Figure((12, 11), layout="tight"), "by_step": Figure((11, 3.6), layout="tight")}
    for axis, (name, parts) in zip(figures["confusion"].subplots(2, 2).flat, arrays.items(), strict=True):
        counts = parts["confusion"].sum(1)
        share = parts["confusion"] / np.maximum(counts, 1)[:, None]
        axis.imshow(share, cmap="Blues", alpha=0.6, vmin=0, vmax=1)
        for (row, column), value in np.ndenumerate(share):
            axis.text(column, row, f"{value:.2f}", ha="center", va="center")
        axis.set_xticks(range(NUM_ACTIONS), game.ACTION_NAMES, rotation=40)
        axis.set_yticks(range(NUM_ACTIONS), [f"{a} ({n:.0f})" for a, n in zip(game.ACTION_NAMES, counts, strict=True)])
        axis.set(title=name, xlabel="predicted", ylabel="true (how often)")
    top1, probes = figures["by_step"].subplots(1, 2)
    for name, parts in arrays.items():
        top1.plot(parts["by_step"], label=name)
        probes.plot(parts.get("probe_by_step", []), label=name)
    top1.set(xlabel="step of the game", title="top-1: how fast is a co-player recognised?")
    top1.legend(fontsize=7)
    probes.set(xlabel="step of the game", title="probe accuracy: does g tell which prey j will take?")
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=75)
        writer.add_image(name, np.array(Image.open(path).convert("RGB")), step, dataformats="HWC")


# ---- Training and files


def optimizer_step(optimizer: torch.optim.Adam, loss, max_norm: float) -> torch.Tensor:
    """One step down the sum of losses [M]. -> the norm of each learner's gradient [M], each clipped to max_norm"""
    optimizer.zero_grad()
    loss.sum().backward()
    grads = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
    norms = torch.cat([grad.flatten(1) for grad in grads], 1).norm(dim=1)
    factor = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor.view(-1, *[1] * (grad.dim() - 1)))
    optimizer.step()
    return norms


def train_epoch(args: Args, config, models: dict, optimizer, data: Trajectories, epoch: int) -> dict[str, list[float]]:
    """One pass over the trajectories [S, R, ...] -> the mean of every loss [S] over all samples"""
    torch.manual_seed(1_000_003 * args.seed + epoch)  # so a resumed run goes on with the same numbers
    device = data.acted.device
    cells, actions = symmetries(config, device)
    batches = torch.rand(data.acted.shape[:2], device=device).argsort(1).split(args.batch_size, 1)
    sizes = torch.stack([data.acted.sum(2).gather(1, index).sum(1).max() for index in batches]).tolist()
    sums, samples = {}, 0.0
    for number, (index, size) in enumerate(zip(batches, sizes, strict=True)):
        progress = (epoch + number / len(batches)) / args.epochs
        optimizer.param_groups[0]["lr"] = args.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
        which = torch.randint(len(cells), index.shape, device=device)
        batch = make_batch(config, data, index, size, (cells, actions, which) if args.augment else None)
        losses = vae_losses(args, config, models, batch, goal_noise(args, 2, *batch.clock.shape, device=device))
        optimizer_step(optimizer, losses["total"], 1.0)
        count = batch.weight.sum(1)
        samples = samples + count
        for name, value in losses.items():
            sums[name] = sums.get(name, 0.0) + value.detach() * count
    return {name: (value / samples).tolist() for name, value in sums.items()}


def check_resume(args, saved) -> None:
    """Refuses flags that differ from those of the run that goes on; MAY_CHANGE lists those that may."""
    here, there = (vars(flags) | vars(flags.config) for flags in (args, saved))
    may = ", ".join(f"--{name.replace('_', '-')}" for name in MAY_CHANGE if name not in ("device", "resume"))
    for name, value in here.items():
        if name not in ("config", *MAY_CHANGE):
            flag, was = f"--{name.replace('_', '-')}", there[name]
            game.refuse(value != was, f"{flag} {value}: the resumed run has {was}; only {may} may change")


@contextlib.contextmanager
def stop_requests():
    """-> a list that SIGINT (Ctrl-C) or SIGTERM adds itself to; a second one ends the process at once"""
    asked, before = [], {}

    def ask(number, _):
        asked.append(number)
        os.write(2, b"\nstopping after this iteration; once more: at once\n")
        for each in before:
            signal.signal(each, signal.SIG_DFL)

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def save_checkpoint(path: Path, content: dict) -> None:
    """Written aside and renamed: what stands at `path` is always whole, also after a power cut. A checksum follows the
    archive."""
    try:
        torch.save(content, f"{path}.part")
        with open(f"{path}.part", "r+b") as file:
            file.write(hashlib.file_digest(file, "sha256").digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.part", path)
    except (OSError, RuntimeError) as error:  # torch takes a full disk for a RuntimeError
        earlier = ", an earlier one there is untouched" if path.exists() else ""
        raise game.UserError(f"could not write {path}{earlier}: {str(error).splitlines()[0]}") from error


def load_checkpoint(path: str | Path, expected: str = FORMAT, keys: dict = KEYS) -> dict:
    """path: the checkpoint, or the run folder of any seed. keys: what it must hold -> of which type"""
    path = game.find_checkpoint(path)
    data = path.read_bytes()
    whole = hashlib.sha256(data[:-32]).digest() == data[-32:]
    game.refuse(not whole, f"{path} ({len(data)} bytes) is damaged, cut short or no checkpoint: its checksum is wrong")
    try:
        saved = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch makes of an archive that somebody else wrote
        raise game.UserError(f"{path} is no checkpoint: {str(error).splitlines()[0]}") from error
    found = saved.get("format") if isinstance(saved, dict) else type(saved).__name__
    game.refuse(found != expected, f"{path} is no checkpoint of this script: it is {found!r}, not {expected!r}")
    for key, kind in keys.items():
        value = saved.get(key)
        wrong = not isinstance(value, kind) or value == [] or (kind in (int, float) and value < 0)
        game.refuse(wrong, f"{path} is no whole checkpoint: its {key} is missing or wrong")
    if "problem" in saved:  # kept to be looked at
        print(f"{path} was kept because {saved['problem']}")
        return saved
    for name, x in tree_leaves_with_path(saved):
        bad = isinstance(x, torch.Tensor) and not x.isfinite().all()
        game.refuse(bad, f"{path}: {keystr(name)} holds values that are no numbers")
    return saved


def load_args(path: str, saved: dict, **changes) -> Args:
    """The flags of a checkpoint, with changes"""
    try:
        args = Args(**saved | changes | {"config": StagHuntConfig(**saved["config"])})
        validate(args)
    except (TypeError, KeyError, AttributeError) as error:
        raise game.UserError(f"{path}: its flags are not those of this script: {error}") from error
    return args


def truncate_metrics(path: Path, kept_at: Path, last_step: int) -> None:
    """Drops what was logged after the checkpoint, and what cannot be read"""
    kept = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines() if path.exists() else [], start=1):
        try:
            kept += [line + "\n"] if json.loads(line)["steps"] <= last_step else []
        except (ValueError, KeyError, TypeError, RecursionError):
            print(f"{path}: line {number} is broken, it is left out")
    if last_step and not kept:
        print(f"{path} is missing or empty: the metrics before the checkpoint are lost")
    Path(f"{kept_at}.part").write_text("".join(kept))
    os.replace(f"{kept_at}.part", kept_at)


@contextlib.contextmanager
def open_run(args, label: str, checkpoint: dict | None, step: int):
    """-> folders, one per seed, and their TensorBoard writers: new ones, or the resumed run's as they were at `step`,
    where its checkpoint lies, also if that was moved or copied. A lock keeps other processes out, however this ends."""
    seeds, stamp = range(args.seed, args.seed + args.num_seeds), int(time.time())
    while any(Path(args.run_dir).glob(f"*__{stamp}")):  # another run began in the same second
        stamp += 1
    folders = [Path(args.run_dir) / f"{args.exp_name}__{label}__{seed}__{stamp}" for seed in seeds]
    if checkpoint:
        first, names = Path(args.resume).resolve().parent, checkpoint["folders"]
        if first.name != names[0]:
            names = [f"{first.name}__{seed}" for seed in seeds]
        folders = [first, *(first.parent / name for name in names[1:])]
    earlier = folders
    if checkpoint and args.run_dir != checkpoint["args"]["run_dir"]:  # goes on elsewhere
        folders = [Path(args.run_dir) / folder.name for folder in folders]
        taken = folders[0].exists() and folders[0].resolve() != earlier[0]
        game.refuse(taken, f"--run-dir {args.run_dir}: there is a {folders[0]} already")
    flags = dataclasses.asdict(args) | {"checkpoint": f"../{folders[0].name}/checkpoint.pt"}
    table = "\n".join(f"|{name}|{value}|" for name, value in flags.items())
    with contextlib.ExitStack() as held:
        try:
            folders[0].mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(open(folders[0] / "lock", "a+"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            print(f"process {os.getpid()} on {os.uname().nodename}, since {time.ctime()}", file=lock, flush=True)
            for folder, old in zip(folders, earlier, strict=True):
                folder.mkdir(exist_ok=True)
                (folder / "args.json").write_text(json.dumps(flags, indent=2) + "\n")
                if checkpoint:
                    truncate_metrics(old / "metrics.jsonl", folder / "metrics.jsonl", step)
        except BlockingIOError as error:
            raise game.UserError(f"{folders[0]} is in use by {Path(lock.name).read_text().strip()}") from error
        except OSError as error:
            raise game.UserError(f"could not write to {error.filename or folders[0]}: {error.strerror}") from error
        threading.excepthook, before = lambda _: None, threading.excepthook  # of TensorBoard: never_fatal says it
        held.callback(setattr, threading, "excepthook", before)
        writers = []
        for folder in folders:
            writers.append(SummaryWriter(folder, purge_step=step + 1))
            held.callback(never_fatal("write to TensorBoard")(writers[-1].close))
            with never_fatal("write to TensorBoard"):
                writers[-1].add_text("hyperparameters", f"|flag|value|\n|-|-|\n{table}", step)
        yield folders, writers


def main(args: Args) -> dict[str, float]:
    """Returns the final figures, averaged over seeds, as {"with history/top1": ...}."""
    started, epoch, checkpoint = time.time(), 0, None
    config, device = validate(args), game.resolve_device(args.device)
    game.check_memory(memory_needs(args), device)
    if args.resume is not None:
        args = dataclasses.replace(args, resume=str(game.find_checkpoint(args.resume, "--resume")))
        checkpoint = load_checkpoint(args.resume)
        check_resume(args, load_args(args.resume, checkpoint["args"]))
        kind, over = checkpoint["device"], checkpoint["step"] > args.epochs
        game.refuse(kind != device.type, f"--resume {args.resume} is a run on {kind}: it cannot go on on {device.type}")
        game.refuse(over, f"--epochs {args.epochs}: the run has {checkpoint['step']} already")
    if checkpoint is None or args.run_dir != checkpoint["args"]["run_dir"]:
        game.check_run_flags(args)
    if device.type == "cuda":  # sums in the same order in each run
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    seeds = list(range(args.seed, args.seed + args.num_seeds))
    models = make_models(args, config, seeds, device)
    games = [collect_trajectories(args, config, seed, device) for seed in seeds]
    data, held_out = (tree_map(lambda *x: pad_sequence(x, True), *parts) for parts in zip(*games, strict=True))
    params = [p for stacked in models.values() for p in stacked.parameters()]
    optimizer = torch.optim.Adam(params, args.learning_rate, fused=True)
    if checkpoint:
        try:
            for name, stacked in models.items():
                stacked.load_state_dict(checkpoint["networks"].get(name))
        except game.UserError as error:
            raise game.UserError(f"--resume {args.resume}: {error}") from error
        try:
            optimizer.load_state_dict(checkpoint["optimizer"])
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise game.UserError(f"{args.resume}: its optimizer does not fit: {error}") from error
        epoch, started = checkpoint["step"], started - checkpoint["seconds"]
    unfinished = epoch < args.epochs

    def save(name="checkpoint.pt", **more):
        content = {"format": FORMAT, "args": dataclasses.asdict(args), "device": device.type, "step": epoch}
        content |= {"networks": {name: stacked.state_dict() for name, stacked in models.items()}}
        content |= {"optimizer": optimizer.state_dict(), "seconds": time.time() - started}
        must_match = {name: getattr(args, name) for name in ("goal_kind", "goal_dim", "subgoal_hidden")}
        board = ("height", "width", "num_players", "num_stags", "num_hares", "max_wall_pieces")
        content["must_match"] = must_match | {name: getattr(config, name) for name in board}  # where it is loaded
        save_checkpoint(folders[0] / name, content | {"folders": [folder.name for folder in folders]} | more)

    run = open_run(args, f"{config.setting}_{args.goal_kind}", checkpoint, epoch)
    with run as (folders, writers), stop_requests() as stop:
        print(f"{config.setting}, {args.goal_kind} subgoals, on {device}; run folder {folders[0]}", flush=True)
        with tqdm(initial=epoch, total=args.epochs, unit="epoch", mininterval=1) as bar:
            while epoch < args.epochs and not stop:
                losses = train_epoch(args, config, models, optimizer, data, epoch)
                epoch += 1
                tables, _ = measure(args, config, models, Trajectories(*(x[:, :1000] for x in held_out)))
                for s, (folder, writer) in enumerate(zip(folders, writers, strict=True)):
                    row = {f"losses/{name}": values[s] for name, values in losses.items()}
                    for name, figures in tables[s].items():
                        row |= {f"{TAGS[name]}/{key}": x for key, x in figures.items()}
                    row["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
                    write_row(writer, folder / "metrics.jsonl", epoch, row, args.log_details)
                bad = [name for name, values in losses.items() if not all(abs(x) < 1e6 for x in values)]
                if bad or not all(p.abs().amax() < 1e6 for p in params):
                    bad.append("total")
                    problem = f"losses/{bad[0]} is {losses[bad[0]]}"
                    save("checkpoint_bad.pt", problem=problem)
                    raise FloatingPointError(f"{problem}; see {folders[0]}/checkpoint_bad.pt")
                now, best = (np.mean([table[name]["top1"] for table in tables]) for name in PREDICTORS[1:3])
                bar.set_postfix_str(f"loss {np.mean(losses['total']):.4g}, top-1 {now:.4f} (ceiling {best:.4f})")
                bar.update()
                save()
        if epoch < args.epochs:
            command = shlex.join(["python", sys.argv[0], "--resume", f"{folders[0]}/checkpoint.pt"])
            print(f"stopped; go on with: {command}")
            raise SystemExit(128 + stop[0])

        tables, arrays = measure(args, config, models, held_out, Trajectories(*(x[:, :4000] for x in data)))
        for folder, writer, table, drawn in zip(folders, writers, tables, arrays, strict=True):
            write_csv(folder / "evaluation" / "final.csv", table)
            with never_fatal("draw"):
                if unfinished:
                    writer.add_scalar("omg/probe_accuracy", table["with history"]["probe_accuracy"], epoch)
                    draw_pictures(folder, writer, drawn, epoch)
    show_table(tables)
    print(f"{time.time() - started:.1f} s in all; checkpoint, CSV and pictures in {folders[0]}")
    rows = [{f"{name}/{key}": x for name in PREDICTORS for key, x in table[name].items()} for table in tables]
    means = {name: interval([row[name] for row in rows])[0] for name in rows[0]}
    return {"checkpoint": str(folders[0] / "checkpoint.pt"), **means}


if __name__ == "__main__":
    game.command_line(parse_args, main)
