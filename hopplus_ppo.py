"""HOP+ on Stag Hunt: independent hunters that learn with PPO, infer the others' subgoals (OMG, a CVAE), model their
actions (MOA) and the world, and learn from imagined rollouts.

    python hopplus_ppo.py                                         # the full method on 4x4
    python hopplus_ppo.py --method ppo                            # plain PPO (ppo-omg: with subgoals, no imagination)
    python hopplus_ppo.py --height 8 --width 8 --num-seeds 5      # five complete experiments in one process
    python hopplus_ppo.py --seats learner,nearest_stag,nearest_hare,random
    python hopplus_ppo.py --resume runs/RUN/checkpoint.pt
    torchrun --nproc-per-node 8 hopplus_ppo.py --num-envs 2048    # the games split over 8 GPUs, gradients averaged
    python evaluation/evaluate.py runs/RUN                        # frozen; also adapt.py and cross_play.py

Axes: S seeds, E games per seed, B = S*E games, N seats, M learners, T steps, C planes, H W board, A actions, D subgoal,
K co-players, n rows of any kind. What a learner reads or predicts about players is in its ego order: itself first.
`docs/hopplus_ppo.md` explains every metric, `docs/editing.md` shows four edits.
"""

import collections
import contextlib
import copy
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
from stag_hunt_env import (
    HUNT_STAG,
    NUM_ACTIONS,
    STAY,
    Count,
    Fraction,
    NonNegative,
    Positive,
    StagHuntConfig,
    StagHuntEnv,
    Whole,
)

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.func import stack_module_state, vmap
from torch.nn import functional as F
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

FORMAT = "hopplus_ppo.py 13"  # of a checkpoint
KEYS = {  # in it
    "args": dict,
    "iteration": int,
    "device": str,
    "states": list,
    "script": dict,
    "folders": list,
    "seconds": float,
}
PRETRAINED_KEYS = {"must_match": dict, "networks": dict}  # in a checkpoint of pretraining
MAY_CHANGE = ("total_timesteps", "log_every", "save_seconds", "num_pictures", "run_dir", "device", "resume")

# ---- Arguments. Class defaults are for a GPU; make_args changes them by device and method.


@dataclasses.dataclass
class RunArgs:
    exp_name: str = Path(__file__).stem
    """first part of the run's name"""
    method: Literal["ppo", "ppo-omg", "hopplus"] = "hopplus"
    """a set of flags: plain PPO; with subgoals and memory; with these and imagination"""
    seed: Whole = 1
    """seed of the first experiment; the others count up from it, but are not what --seed 2, 3, ... alone would be"""
    num_seeds: Count = 1
    """S, complete experiments side by side, each with its own weights and TensorBoard run"""
    total_timesteps: Count = 2_000_000
    """env steps per seed"""
    share_parameters: bool = False
    """one set of networks for all learners of a seed"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train; auto: on the GPU if there is one"""
    run_dir: str = "runs"
    """folder in which the runs' folders are made"""
    resume: str | None = None
    """continue the run of this checkpoint or run folder, bit for bit, on the same kind of device, with its flags; a
    larger --total-timesteps extends it, --log-every, --save-seconds, --num-pictures and --run-dir may change too"""
    log_every: Count = 5
    """iterations between two rows in the logs"""
    log_details: bool = False
    """log every metric, not only the main ones"""
    num_pictures: Whole = 10
    """how often in a run histograms and pictures go to TensorBoard"""
    save_seconds: NonNegative = 60.0
    """seconds between two checkpoints"""


@dataclasses.dataclass
class PPOArgs:
    num_envs: Count = 256
    """E, games per seed"""
    num_steps: Count = 32
    """T, steps of each game per iteration"""
    learning_rate: Positive = 1e-3
    """Adam's step size; on a GPU 5e-4 is safer without imagination and search: else teams often settle on hares"""
    anneal_lr: bool = True
    """let it fall linearly to a tenth"""
    policy_hidden: Count = 128
    """width of the policy's encoder, of the layers that actor and critic share and of their own"""
    update_epochs: Count = 4
    """passes over each batch"""
    num_minibatches: Count = 4
    """minibatches per pass"""
    gamma: Fraction = 0.99
    """discount"""
    gae_lambda: Fraction = 0.95
    """lambda of generalised advantage estimation (1: Monte Carlo returns)"""
    clip_coef: Positive = 0.2
    """clip range of the ratio"""
    clip_vloss: bool = False
    """clip the value loss too: the larger error of the new value and of that clipped to the old one +- clip_coef"""
    ent_coef: NonNegative = 0.03
    """weight of the entropy"""
    vf_coef: NonNegative = 0.5
    """weight of the value loss"""
    max_grad_norm: Positive = 0.5
    """clip each learner's gradient to this norm (the models': 1)"""


@dataclasses.dataclass
class OpponentArgs:
    subgoals: Literal["none", "actions", "inferred", "posterior", "oracle"] = "inferred"
    """what the policy reads about each co-player: nothing; MOA's prediction, a MOA without subgoals; q_phi's mean; the
    exact Bayes posterior; who it is"""
    goal_kind: Literal["continuous", "discrete"] = "continuous"
    """Gaussian subgoals, or categories drawn by straight-through Gumbel-softmax"""
    goal_dim: Count = 16
    """D, the size of a subgoal (discrete: the number of categories)"""
    subgoal_hidden: Count = 64
    """width of the subgoal networks and the MOA"""
    subgoal_selection: Literal["conservative", "optimistic", "final"] = "conservative"
    """s^g in hindsight: the next state of lowest or of highest V(s, g); or the last before the co-player left"""
    subgoal_horizon: Count = 5
    """how many states ahead s^g is looked for"""
    hindsight_eps: Fraction = 0.5
    """share of MOA's training that reads hindsight subgoals, at the start; falls to 0 halfway"""
    kl_coef: NonNegative = 1e-3
    """weight of KL(q_phi || f_psi(s^g)), and in pretraining of f_psi's KL to a standard normal (0.01: it collapses)"""
    moa_data: Literal["present", "rewarded"] = "present"
    """steps that MOA and q_phi learn from: co-player on the board; and in a game in which it scored"""
    inter_episode_belief: bool = True
    """keep the history of each co-player from game to game"""
    memory_discount: Fraction = 0.9
    """what of it is left at the start of the next game; above 1 - history_reset_prob it outgrows what training shows"""
    history_reset_prob: Fraction = 0.1
    """how often, in training, all of it is reset after a game: else nobody learns to play with strangers"""
    subgoal_learning_rate: Positive = 1e-3
    """q_phi and MOA: Adam's step size (in pretraining 3e-3, falling)"""
    subgoal_updates: Whole = 4
    """q_phi and MOA: updates per training iteration (0: do not train them)"""
    subgoal_period: Count = 1
    """q_phi and MOA: train in every k-th iteration"""
    subgoal_batch_size: Count = 64
    """q_phi and MOA: windows of T steps per update and learner"""
    vae_checkpoint: str | None = None
    """start f_psi, q_phi and MOA from this checkpoint of pretrain_vae.py instead of pretraining here"""
    pretraining_updates: Whole = 800
    """updates of each model on rule-based games before the first iteration"""
    pretraining_games: Count = 1024
    """rule-based games at a time, per seed"""
    offline_ratio: Fraction = 0.5
    """share of the models' samples that are games of rule-based players, played beside the learners' own"""


@dataclasses.dataclass
class WorldModelArgs:
    wm_hidden: Count = 128
    """width of the hidden layers"""
    wm_learning_rate: Positive = 1e-3
    """Adam's step size (in pretraining 2e-3, falling)"""
    wm_updates: Whole = 4
    """updates per training iteration (0: do not train it)"""
    wm_period: Count = 1
    """train in every k-th iteration"""
    wm_batch_size: Count = 1024
    """transitions per update and learner"""
    world_model_checkpoint: str | None = None
    """start from this checkpoint of pretrain_world_model.py instead of pretraining here"""
    replay_rollouts: Count = 4
    """R, the last iterations that the models learn and imagine from; in every R-th they watch new rule-based games"""


@dataclasses.dataclass
class ImaginationArgs:
    imagination: bool = True
    """learn from imagined rollouts too"""
    imagination_horizon: Count = 8
    """most steps of an imagined rollout"""
    trust_exact_match: Fraction = 0.99
    """adaptive horizon: k steps are imagined if this share of k-step predictions is exact (0: always all)"""
    ppo_real_ratio: Fraction = 0.2
    """share of real samples in PPO's batch, imagined ones after an end or a cut counted too (1: plain PPO)"""
    critic_data: Literal["real", "mixed"] = "real"
    """what the critic learns from: real samples, or imagined ones too"""
    imagined_weight: NonNegative = 1.0
    """weight of an imagined sample beside a real one"""
    imagined_goals: Literal["current", "prior"] = "current"
    """which subgoals imagined co-players have: those of the replay; prior: in every second rollout those of rule-based
    games, from which it then starts, so that the policy learns to answer goals that self-play never shows"""


@dataclasses.dataclass
class SpeedArgs:
    cudagraphs: bool = True
    """on a GPU: replay whole iterations as CUDA graphs"""
    compile: bool = False
    """on a GPU: fuse game, networks and losses with torch.compile; takes a minute at the start"""
    precision: Literal["fp32", "tf32", "bf16"] = "tf32"
    """on a GPU: matrix products in float32; in tf32; in bfloat16 (the models' training stays in tf32)"""


@dataclasses.dataclass
class Args(RunArgs, game.SeatFlags, PPOArgs, OpponentArgs, WorldModelArgs, ImaginationArgs, SpeedArgs):
    config: StagHuntConfig = dataclasses.field(default_factory=StagHuntConfig)


GROUPS = {"run": RunArgs, "game": StagHuntConfig, "seats": game.SeatFlags, "ppo": PPOArgs}
GROUPS |= {"opponent_model": OpponentArgs, "world_model": WorldModelArgs, "imagination": ImaginationArgs}
GROUPS |= {"speed": SpeedArgs}
GIVEN = ("posterior", "oracle")  # subgoals that no network infers
METHODS = {
    "ppo": {"subgoals": "none", "imagination": False, "inter_episode_belief": False},
    "ppo-omg": {"subgoals": "inferred", "imagination": False, "inter_episode_belief": True},
    "hopplus": {"subgoals": "inferred", "imagination": True, "inter_episode_belief": True},
}
METHODS["ppo"]["learning_rate"] = METHODS["ppo-omg"]["learning_rate"] = 5e-4  # larger steps often end with hares
ON_CPU = {  # what two cores do well
    **{"num_envs": 128, "total_timesteps": 250_000, "policy_hidden": 64, "log_every": 1, "save_seconds": 20.0},
    **{"subgoal_updates": 2, "subgoal_period": 2, "subgoal_batch_size": 8, "wm_updates": 2, "wm_batch_size": 256},
    **{"pretraining_updates": 200, "pretraining_games": 64, "imagination_horizon": 5, "ppo_real_ratio": 0.6},
}
METHODS_ON_CPU = {"ppo": {"num_envs": 256, "total_timesteps": 400_000, "update_epochs": 3, "learning_rate": 1e-3}}
METHODS_ON_CPU["ppo-omg"] = METHODS_ON_CPU["ppo"]


def make_args(method: str = "hopplus", device: str = "auto", **changes) -> Args:
    """Complete flags; with `resume` those of the run that goes on"""
    if changes.get("resume") is not None:
        path = game.find_checkpoint(changes["resume"], "--resume")
        return load_args(path, load_checkpoint(path)["args"], device=device, **changes)
    game.refuse(method not in METHODS, f"--method must be one of {', '.join(METHODS)}, not {method}")
    values = {"method": method, "device": device, **METHODS[method]}
    if game.resolve_device(device).type == "cpu":
        values |= ON_CPU | METHODS_ON_CPU.get(method, {})
    return Args(**{**values, **changes})


def parse_args(words: list[str]) -> Args:
    early = game.early_flags(words, method="hopplus", device="auto", resume=None)
    return game.parse(Args, GROUPS, make_args(**early), words)


def validate(args: Args) -> StagHuntConfig:
    """Refuses wrong flags before anything is written."""
    config, refuse = args.config, game.refuse
    models = args.imagination or args.subgoals not in ("none", *GIVEN)
    kinds = len(args.population.split(","))
    game.check_ranges(args)
    game.resolve_device(args.device)
    game.population_names(args.population)
    game.redraw_prob(args.redraw)
    refuse("learner" not in game.seats_table(args.seats, config.num_players), f"--seats {args.seats}: nobody learns")
    refuse(args.num_steps * args.num_envs < args.num_minibatches, "--num-minibatches exceeds a learner's samples")
    refuse(config.num_cells > 255, f"--height, --width: a board has up to 255 cells, not {config.num_cells}")
    refuse(config.final_time > 255, f"--final-time is up to 255, not {config.final_time}")
    refuse(args.vae_checkpoint and not models, "--vae-checkpoint needs --subgoals inferred or --imagination")
    refuse(args.world_model_checkpoint and not args.imagination, "--world-model-checkpoint needs --imagination")
    refuse(args.subgoals in GIVEN and args.goal_dim <= kinds, f"--subgoals {args.subgoals} needs --goal-dim > {kinds}")
    refuse(models and args.subgoal_hidden < 2, "--subgoal-hidden must be 2 or more")
    both_kinds = models and 0 < args.offline_ratio < 1
    refuse(
        both_kinds and args.subgoal_batch_size < 2, "--offline-ratio needs --subgoal-batch-size 2 or more, or 0 or 1"
    )
    refuse(both_kinds and args.wm_batch_size < 2, "--offline-ratio needs --wm-batch-size 2 or more, or 0 or 1")
    refuse(args.goal_kind == "discrete" and args.goal_dim < 2, "--goal-kind discrete needs --goal-dim 2 or more")
    if args.imagination:
        beyond = args.imagination_horizon > args.num_steps
        refuse(not args.ppo_real_ratio and args.critic_data == "real", "--ppo-real-ratio 0 needs --critic-data mixed")
        refuse(beyond, f"--imagination-horizon is measured on --num-steps {args.num_steps}")
        no_games = args.imagined_goals == "prior" and not args.offline_ratio
        refuse(no_games, "--imagined-goals prior needs rule-based games: --offline-ratio > 0")
        refuse(config.prosocial, "--prosocial rewards depend on more than the world model sees: --no-imagination")
    return config


def memory_needs(args: Args) -> dict[str, int]:
    """Flags -> bytes that they ask for, roughly"""
    config, hidden, seeds = args.config, args.subgoal_hidden, args.num_seeds
    planes, others = math.prod(config.observation_shape), config.num_players - 1
    table = (2 * config.height - 1) * (2 * config.width - 1) * (config.num_players + 2)  # rows of a BoardEncoder's
    learners = seeds * config.num_players
    samples = learners * args.num_envs * args.num_steps
    needs = {"--num-envs, --num-steps": samples * (2400 + 8 * planes)}
    needs["--policy-hidden"] = 32 * learners * args.policy_hidden * (table + 3 * args.policy_hidden)
    if args.imagination:
        needs["--ppo-real-ratio"] = int(samples * (1 - args.ppo_real_ratio) / (args.ppo_real_ratio or 0.5)) * 2400
    if args.imagination or args.subgoals not in ("none", *GIVEN):
        windows = learners * args.subgoal_batch_size * args.num_steps * others
        tried = windows * args.subgoal_horizon
        needs["--subgoal-hidden"] = 48 * learners * hidden * (table + 2 * planes + 4 * hidden)
        needs["--subgoal-batch-size, --num-steps"] = 24 * windows * (table + 8 * hidden)
        needs["--subgoal-horizon, --num-steps"] = 12 * tried * args.policy_hidden
        goals = windows + tried * others + samples * others + learners * (planes + hidden)
        needs["--goal-dim"] = 12 * args.goal_dim * goals
        needs["--wm-hidden"] = 16 * learners * args.wm_hidden * (args.wm_hidden + 150)
        needs["--wm-batch-size"] = 16 * learners * args.wm_batch_size * config.num_players * (150 + args.wm_hidden)
        needs["--replay-rollouts"] = 2 * args.replay_rollouts * samples * (50 + 2 * planes)
        needs["--pretraining-games"] = learners * args.pretraining_games * args.num_steps * (2400 + 8 * planes)
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


def goal_size(args: Args) -> int:
    """How many numbers the policy reads about each co-player"""
    return {"none": 0, "actions": NUM_ACTIONS}.get(args.subgoals, args.goal_dim)


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


class WorldModel(nn.Module):
    """The rules are local, and so is the network: everyone's action is painted on its cell, and the 3x3 cells around
    each player say where that player goes (one of 4 neighbours, stay, gone), whether the prey on its cell is taken and,
    for the observer, which payoff is paid. No weight belongs to a cell or a seat, so any board size will do. Players
    cannot jump, split, fade or leave where no prey stands, prey cannot appear, and the reward is one that exists."""

    def __init__(self, config: StagHuntConfig, args: Args):
        super().__init__()
        row, column = np.divmod(np.arange(config.num_cells), config.width)
        row, column = row[:, None] + [-1, -1, -1, 0, 0, 0, 1, 1, 1], column[:, None] + [-1, 0, 1] * 3
        on_board = (row >= 0) & (row < config.height) & (column >= 0) & (column < config.width)
        around = np.where(on_board, row * config.width + column, config.num_cells)  # cell number H*W: off the board
        self.register_buffer("around", torch.from_numpy(around), persistent=False)  # [H*W, 9]
        self.register_buffer("target", self.around[:, [1, 7, 3, 5, 4]], persistent=False)  # up, down, left, right, stay
        self.register_buffer("payoffs", torch.tensor(list(config.payoffs())), persistent=False)
        self.num_players, self.by_name = config.num_players, config.strengths is not None
        # The player's own action; around it, how many do what (a sum: two hunters differ from one), or, where players
        # differ in strength, who does, and how strong each is; and the board.
        inputs = NUM_ACTIONS + 9 * (NUM_ACTIONS + 4)
        if self.by_name:
            inputs = NUM_ACTIONS + 9 * (NUM_ACTIONS * config.num_players + 4) + config.num_players
            seat = torch.arange(config.num_players)
            strengths = torch.tensor(config.strengths, dtype=torch.float32)[(seat[:, None] + seat) % config.num_players]
            self.register_buffer("strengths", strengths / strengths.mean(), persistent=False)  # [seat, N] in ego order
        self.padding = -inputs % 8  # a GPU reads rows faster that begin at multiples of 16 bytes
        self.trunk = mlp(inputs + self.padding, args.wm_hidden, args.wm_hidden, gain=math.sqrt(2))
        # One head per own action: a bystander is not mistaken for one of the party that it stands among. And one payoff
        # head per size of a hunting party: one head for all would pay four hunters, which are rare, as three.
        self.outcome_head = layer(args.wm_hidden, NUM_ACTIONS * 6, 0.01)
        self.prey_head = layer(args.wm_hidden, 1, 0.01)
        self.num_payoff_heads = HUNT_STAG + 2 * config.num_players
        self.payoff_head = layer(args.wm_hidden, self.num_payoff_heads * len(self.payoffs), 0.01)

    def read(self, board):
        """uint8 [n, C, H, W] -> planes [n, C, H*W], cell [n, N], present [n, N]"""
        planes = board.flatten(2)
        players = planes[:, : self.num_players]
        return planes, players.argmax(2), players.amax(2) > 0

    def forward(self, board, joint, seat):
        """board uint8 [n, C, H, W] and joint action [n, N], both in the observer's ego order, the observer's seat [n]
        -> logits of each player's outcome [n, N, 6], of the prey on its cell being taken [n, N], of the observer's
        payoff [n, R]"""
        planes, cell, present = self.read(board)
        n, seen = self.num_players, planes.to(self.prey_head.weight.dtype)
        own = F.one_hot(joint.long(), NUM_ACTIONS).to(seen.dtype)
        painted = own.mT @ seen[:, :n]  # [n, 7, H*W]
        if self.by_name:
            painted = (own[..., None] * seen[:, :n, None]).flatten(1, 2)  # [n, N * 7, H*W]
        painted = F.pad(torch.cat([painted, seen[:, n:], torch.ones_like(seen[:, :1])], 1), (0, 1))  # off the board: 0
        around = self.around[cell].flatten(1)[:, None].expand(-1, painted.shape[1], -1)  # [n, _, N * 9]
        patch = painted.gather(2, around).unflatten(2, (n, 9)).transpose(1, 2).flatten(2)
        inputs = [own, patch]
        if self.by_name:
            inputs.append(self.strengths[seat.long()][:, None].expand(-1, n, -1).to(seen.dtype))
        x = F.pad(torch.cat(inputs, 2), (0, self.padding))
        x = self.trunk(x).relu_()  # [n, N, hidden]
        walls = F.pad(planes[:, n], (0, 1), value=1)
        blocked = walls.gather(1, self.target[cell].flatten(1)).view(*cell.shape, 5) > 0
        no_prey = planes[:, -2:].amax(1).gather(1, cell) == 0  # nobody leaves from here
        outcome = self.select_head(self.outcome_head(x), joint.long(), NUM_ACTIONS).float()
        outcome = outcome.masked_fill(torch.cat([blocked, no_prey[..., None]], 2), -1e9)
        action = joint[:, 0].long()
        party = ((cell == cell[:, :1]) & (joint == joint[:, :1]) & present).sum(1).clamp(min=1)
        hunt_head = HUNT_STAG + (action - HUNT_STAG) * n + party - 1
        payoff_head = torch.where(action >= HUNT_STAG, hunt_head, action)
        payoff = self.select_head(self.payoff_head(x[:, 0]), payoff_head, self.num_payoff_heads)
        return outcome, self.prey_head(x).squeeze(2).float(), payoff.float()

    @staticmethod
    def select_head(logits, head, num_heads: int):
        """[..., num_heads * outputs], int64 [...] -> [..., outputs]"""
        logits = logits.unflatten(-1, (num_heads, -1))
        index = head[..., None, None].expand(*head.shape, 1, logits.shape[-1])
        return logits.gather(-2, index).squeeze(-2)

    def loss(self, board, joint, seat, next_board, reward):
        """-> [n]"""
        outcome, taken, payoff = self(board, joint, seat)
        planes, cell, present = self.read(board)
        next_planes, next_cell, next_present = self.read(next_board)
        goes = (self.target[cell] == next_cell[..., None]).byte().argmax(2)
        goes = torch.where(next_present, goes, 5)
        prey, next_prey = (p[:, -2:].amax(1).gather(1, cell).float() for p in (planes, next_planes))
        outcome_loss = -outcome.log_softmax(2).gather(2, goes[..., None])[..., 0] * present
        taken_loss = F.binary_cross_entropy_with_logits(taken, prey - next_prey, reduction="none") * prey * present
        paid = (reward[:, None] - self.payoffs).abs().argmin(1, keepdim=True)
        return (outcome_loss + taken_loss).sum(1) - payoff.log_softmax(1).gather(1, paid)[:, 0]

    def predict(self, board, joint, seat):
        """-> the most likely next board uint8 [n, C, H, W], reward [n]"""
        outcome, taken, payoff = self(board, joint, seat)
        certain = torch.zeros_like(outcome).scatter(2, outcome.argmax(2, keepdim=True), 1.0)
        return self.paint(board, certain, (taken > 0).float()).to(torch.uint8), self.payoffs[payoff.argmax(1)]

    def expected_planes(self, board, joint, seat):
        """-> float [n, C, H, W]: the probabilities behind the prediction"""
        outcome, taken, _ = self(board, joint, seat)
        return self.paint(board, outcome.softmax(2), taken.sigmoid())

    def paint(self, board, outcome, taken):
        """Probabilities of each player's outcome [n, N, 6] and of the prey on its cell being taken [n, N] -> planes"""
        planes, cell, present = self.read(board)
        target = F.pad(self.target[cell], (0, 1), value=planes.shape[2])  # [n, N, 6] where each outcome leads
        nowhere = torch.zeros_like(outcome[..., :1]).expand(-1, -1, planes.shape[2] + 1)
        players = nowhere.scatter(2, target, outcome * present[..., None])
        lost = nowhere.scatter(2, cell[..., None], (taken * present)[..., None]).amax(1, keepdim=True)
        prey = planes[:, -2:] * (1 - lost[..., :-1])
        return torch.cat([players[..., :-1], planes[:, self.num_players, None], prey], 1).view(board.shape)


class ActorCritic(nn.Module):
    """pi(a | own view of the board, clock, last joint action, subgoals of the co-players) and V of the same"""

    def __init__(self, config: StagHuntConfig, args: Args):
        super().__init__()
        hidden, goals = args.policy_hidden, goal_size(args) * (config.num_players - 1)
        entities, walls = config.num_players + config.num_prey, config.num_cells if config.max_wall_pieces else 1
        self.sizes = [entities, walls, 1 + NUM_ACTIONS * config.num_players + goals]
        self.padding = -(hidden + self.sizes[2]) % 8  # as in BoardEncoder
        self.encoder = BoardEncoder(config, hidden)
        self.trunk = mlp(hidden + self.padding + self.sizes[2], hidden, hidden, gain=math.sqrt(2))
        self.actor = mlp(hidden, hidden, NUM_ACTIONS, gain=0.01)
        self.critic = mlp(hidden, hidden, 1)

    def features(self, x):
        """x [n, i] (see policy_inputs) -> [n, _], the subgoals last"""
        entities, walls, rest = x.split(self.sizes, 1)
        return torch.cat([self.encoder(entities.long(), walls), F.pad(rest, (self.padding, 0))], 1)

    def value(self, features):
        """[n, _] -> [n]"""
        return self.critic(self.trunk(features).relu_()).squeeze(1)

    def forward(self, x, legal):
        """x [n, i], legal bool [n, 7] -> log-probabilities [n, 7], values [n]"""
        features = self.trunk(self.features(x)).relu_()
        log_probs = self.actor(features).float().masked_fill(~legal, -1e9).log_softmax(1)
        return log_probs, self.critic(features).squeeze(1)


def policy_inputs(args: Args, entities, walls, clock, last_joint, goals):
    """The learner's own view of the board [M, n, N + P], [M, n, _], [M, n], [M, n, N], [M, n, K*D] -> [M, n, i]"""
    acts = F.one_hot(last_joint.long(), NUM_ACTIONS).flatten(2)
    parts = (entities, walls, clock[..., None], acts, goals)  # cells are numbers up to 255: exact in bfloat16 too
    return torch.cat([x.to(inference_dtype(args, x.device)) for x in parts], 2)


def inference_dtype(args: Args, device) -> torch.dtype:
    return torch.bfloat16 if args.precision == "bf16" and device.type == "cuda" else torch.float32


class Networks(NamedTuple):
    """What M learners own, one Stacked each; None where a flag switches it off"""

    policy: Stacked
    prior: Stacked | None = None  # f_psi
    inference: Stacked | None = None  # q_phi
    moa: Stacked | None = None
    moa_prior: Stacked | None = None  # pretraining only: MOA given f_psi's subgoal of the present state
    world: Stacked | None = None


def make_networks(args: Args, config: StagHuntConfig, seeds: list[int], device) -> Networks:
    """One of each network per entry of `seeds` [M]"""
    dtype = inference_dtype(args, device)
    kinds = {}
    if args.imagination or args.subgoals not in ("none", *GIVEN):
        kinds |= {"prior": SubgoalPrior, "inference": SubgoalInference, "moa": ActionModel, "moa_prior": ActionModel}
    if args.imagination:
        kinds["world"] = WorldModel
    networks = {"policy": Stacked(lambda: ActorCritic(config, args), seeds, device, dtype, dtype)}
    for number, (name, kind) in enumerate(kinds.items(), start=1):
        own_seeds = [10_000 * seed + 1000 * number for seed in seeds]
        networks[name] = Stacked(functools.partial(kind, config, args), own_seeds, device, dtype)
    return Networks(**networks)


# ---- Belief about co-players, on a board that is real or imagined


def compilable(function):
    """The same function; where args, its first argument, say --compile, fused by torch.compile"""

    @functools.cache
    def fused():
        torch._dynamo.config.recompile_limit = 64  # else it would go on uncompiled after 8 shapes
        return torch.compile(function, dynamic=False)

    @functools.wraps(function)
    def call(args, *rest, **named):
        return (fused() if args.compile else function)(args, *rest, **named)

    return call


@compilable
def entity_views(args: Args, env: StagHuntEnv, board, prey_position, num_views: int | None = None):
    """board uint8 [M, n, C, H, W], cells of the prey at the start [M, n, P] -> as each player sees it (num_views: only
    the first ones): entities int64 [M, n, N, N + P] (their cells, H*W: not there), walls [M, n, N, _], legal actions
    bool [M, n, N, 7]"""
    config, n, nowhere = env.config, env.config.num_players, env.config.num_cells
    planes, prey_position = board.flatten(3), prey_position.long()
    players, walls, stags, hares = planes[:, :, :n], planes[:, :, n], planes[:, :, n + 1], planes[:, :, n + 2]
    cell, present = players.argmax(3), players.amax(3) > 0
    player_cells = torch.where(present, cell, nowhere)[..., env.ego[:num_views]]  # [M, n, views, N]
    cell, present, views = cell[:, :, :num_views], present[:, :, :num_views], player_cells.shape[2]
    stag_position, hare_position = prey_position.split([config.num_stags, config.num_hares], 2)
    alive = torch.cat([stags.gather(2, stag_position), hares.gather(2, hare_position)], 2) > 0
    prey_cells = torch.where(alive, prey_position, nowhere)[:, :, None].expand(-1, -1, views, -1)
    target = env.target[cell]  # [M, n, views, 7]
    free = walls.gather(2, target.flatten(2)).view(target.shape) == 0
    on_prey = torch.stack([stags.gather(2, cell), hares.gather(2, cell)], 3) > 0
    legal = torch.cat([(env.possible[cell] & free)[..., :5], on_prey], 3) & present[..., None] | env.is_stay
    walls = walls if config.max_wall_pieces else walls[..., :1]  # nobody reads them
    return torch.cat([player_cells, prey_cells], 3), walls[:, :, None].expand(-1, -1, views, -1).float(), legal


class OpponentBelief(NamedTuple):
    """What a learner holds about its K co-players at one step; n*K rows: co-player by co-player"""

    goals: torch.Tensor  # [M, n, K*D] for the policy
    params: torch.Tensor  # [M, n*K, _] q_phi's distributions
    features: torch.Tensor  # [M, n*K, hidden] of q_phi's encoder
    entities: torch.Tensor  # [M, n*K, N + P] the board as the co-player sees it
    walls: torch.Tensor  # [M, n*K, H*W]
    legal: torch.Tensor  # bool [M, n*K, 7] its legal actions
    present: torch.Tensor  # bool [M, n, K] on the board


@compilable
def infer_opponents(args: Args, env, networks: Networks, views: tuple, clock, history, oracle_id) -> OpponentBelief:
    """views [M, n, N, ...] (see entity_views), clock [M, n], history [M, n, K, 2 * hidden], oracle_id [M, n, K, D]"""
    m, n, k = history.shape[:3]
    entities, walls, legal = (x[:, :, 1:].flatten(1, 2) for x in views)
    features = networks.inference(entities, walls, method="encoder")
    params = networks.inference(features, history.flatten(1, 2).float())
    goals = oracle_id if args.subgoals in GIVEN else goal_mean(args.goal_kind, params)
    if args.subgoals == "actions":
        goals = networks.moa(entities, walls, clock.repeat_interleave(k, 1), goals, legal).exp()
    goals = goals.reshape(m, n, -1)[..., : k * goal_size(args)]
    present = (entities[..., 0] < env.config.num_cells).view(m, n, k)
    return OpponentBelief(goals, params, features, entities, walls, legal, present)


@compilable
def predict_actions(args: Args, networks: Networks, belief: OpponentBelief, clock, noise):
    """clock [M, n], noise [M, n*K, D] -> MOA's log-probabilities of what each co-player does next [M, n, K, 7]"""
    k = belief.present.shape[2]
    if args.subgoals == "actions":
        return belief.goals.unflatten(2, (k, -1)).log()
    goal = sample_goal(args.goal_kind, belief.params, noise)
    if args.subgoals in GIVEN:
        goal = belief.goals.unflatten(2, (k, -1)).flatten(1, 2)
    clock = clock.repeat_interleave(k, 1)
    log_probs = networks.moa(belief.entities, belief.walls, clock, goal, belief.legal)
    return log_probs.unflatten(1, (-1, k))


@compilable
def update_history(args: Args, env, networks: Networks, belief: OpponentBelief, joint, history, done):
    """history [M, n, K, 2 * hidden] after joint action [M, n, N]; after a game's end what the next one starts from"""
    seen = joint.long()[..., env.ego[1:]].flatten(1, 2)  # in each co-player's own ego order
    event = networks.inference(belief.features, seen, method="event").unflatten(1, history.shape[1:3])
    return add_event(history, event * belief.present[..., None], done[..., None, None], history_decay(args))


def add_event(history, event, done, discount):
    """[..., 2 * hidden], [..., hidden], bool [..., 1] -> the history after it; `discount`: what a game's end leaves"""
    now, before = history.chunk(2, -1)
    now = now + event
    next_game = torch.cat([torch.zeros_like(now), discount * (before + now)], -1)
    return torch.where(done, next_game, torch.cat([now, before], -1))


def history_after_game(args: Args, history, discount):
    """What a game's end leaves of a history [..., 2 * hidden]: what the next game starts from"""
    return add_event(history, 0.0, torch.ones_like(history[..., :1], dtype=torch.bool), discount)


def history_decay(args: Args) -> float:
    """What is left of a history in the next game: nothing if that may be with somebody else"""
    redrawn = game.redraw_prob(args.redraw) == 1 and "mixed" in (args.seats or "")
    return args.memory_discount if args.inter_episode_belief and not redrawn else 0.0


# ---- Rollout


class Transitions(NamedTuple):
    """T steps of M learners, each field [M, T, E, ...]; this is what the replay keeps"""

    board: torch.Tensor  # uint8 [..., C, H, W]
    prey_position: torch.Tensor  # uint8 [..., P] at the start of the game
    time: torch.Tensor  # uint8
    first_hunt: torch.Tensor  # int16
    seat: torch.Tensor  # uint8, the learner's: its strength, where these differ
    last_joint: torch.Tensor  # uint8 [..., N] what everybody did before this step
    joint: torch.Tensor  # uint8 [..., N] and in it
    reward: torch.Tensor  # the learner's, from the game
    exited: torch.Tensor  # bool [..., N] who left the board with the step
    done: torch.Tensor  # bool: the game ended with the step
    next_board: torch.Tensor  # uint8 [..., C, H, W] of the same game, also at its end (without world model: nothing)
    history: torch.Tensor  # bfloat16 [..., K, 2 * hidden] before the step
    history_reset: torch.Tensor  # bool: and cleared after it
    oracle_id: torch.Tensor  # [..., K, D] who it is, or how likely (--subgoals oracle, posterior)


def shape_reward(args: Args, config: StagHuntConfig, reward, board, joint):
    """The learner's reward for a step, real or imagined: the place for a bonus of your own. reward [...] from the game,
    board uint8 [..., C, H, W] before the step, joint action [..., N] -> [...]"""
    return reward


@compilable
def evaluate_policy(args: Args, policy: Stacked, views: tuple, clock, last_joint, goals):
    """views [M, n, N, ...] (see entity_views), of which the policy reads the learner's own -> its inputs [M, n, i],
    legal actions, log-probabilities [M, n, 7], values [M, n]"""
    entities, walls, legal = (x[:, :, 0] for x in views)
    inputs = policy_inputs(args, entities, walls, clock, last_joint, goals)
    return inputs, legal, *policy(inputs, legal)


def stack_steps(steps: list[dict], dim: int = 1) -> dict[str, torch.Tensor]:
    return {name: torch.stack([step[name] for step in steps], dim) for name in steps[0]}


@torch.no_grad()
def rollout(args: Args, env, seats, networks, rollout_state, num_steps, learners_act=True):
    """Plays num_steps steps of all games; without learners_act the learners only watch. Goes on from rollout_state,
    last_joint [M, E, N] and history [M, E, K, _], and overwrites it. -> Transitions; outputs, a dict of what the
    policy read and said [M, T, E, ...] (value: [M, T + 1, E]); episodes, a dict of what finished games left [T, B, ...]
    and of everybody's action probabilities [T / 8, B, N, 7]"""
    steps, outputs, values, episodes, probabilities = [], [], [], [], []
    reset_prob = args.history_reset_prob if history_decay(args) else 0.0
    measured = min(num_steps, 8)  # MOA is measured on every 8th step
    obs = env.observe(env.state)
    for step in range(num_steps + 1):
        state, board = env.state, seats.to_learners(obs)
        clock = seats.per_learner(env.clock(state))
        last_joint = rollout_state["last_joint"].clone()
        prey_position = seats.per_learner(state.prey_position)
        views = entity_views(args, env, board, prey_position, 1 if networks.inference is None else None)
        history = oracle_id = goals = next_board = history_reset = clock[..., None][..., :0]  # if off
        if args.subgoals in GIVEN:
            known = seats.oracle_id() if args.subgoals == "oracle" else seats.posterior()
            oracle_id = seats.to_learners(env.seats_to_ego(known))[:, :, 1:]
            oracle_id = F.pad(oracle_id, (0, args.goal_dim - oracle_id.shape[3]))
            goals = oracle_id.flatten(2)
        if networks.inference is not None:
            history = rollout_state["history"].clone()
            belief = infer_opponents(args, env, networks, views, clock, history, oracle_id)
            goals = belief.goals
        inputs, legal, log_probs, value = evaluate_policy(args, networks.policy, views, clock, last_joint, goals)
        values.append(value)
        if step == num_steps:
            break
        probs = seats.action_probs(state, log_probs.exp() if learners_act else None)  # [B, N, 7]
        if networks.moa is not None and (step + 1) % measured == 0:
            probabilities.append({"probs": probs, "posterior_probs": seats.posterior_probs()})
        actions = game.sample(probs)
        joint = seats.to_learners(env.seats_to_ego(actions))
        time_now, first_hunt = seats.per_learner(state.time).byte(), seats.per_learner(state.first_hunt).short()
        obs, reward, present_before, done = env.step(actions)
        seats.update(actions, present_before, done)
        present_after = torch.where(done[:, None], env.final_state.present, env.state.present)
        exited = seats.to_learners(env.seats_to_ego(present_before & ~present_after))
        own_done = seats.per_learner(done)
        if networks.world is not None:
            next_board = seats.to_learners(torch.where(done.view(-1, 1, 1, 1, 1), env.final_observation(), obs))
        if networks.inference is not None:
            next_history = update_history(args, env, networks, belief, joint, history, own_done)
            history_reset = own_done & (torch.rand(own_done.shape, device=env.device) < reset_prob)
            rollout_state["history"].copy_(next_history.masked_fill(history_reset[..., None, None], 0.0))
        rollout_state["last_joint"].copy_(joint.masked_fill(own_done[..., None], STAY))
        fields = {"board": board, "prey_position": prey_position.byte(), "time": time_now, "first_hunt": first_hunt}
        fields |= {"seat": seats.learner_seat.byte(), "last_joint": last_joint.byte()}
        fields |= {"joint": joint.byte(), "reward": seats.to_learners(reward)}
        fields |= {"exited": exited, "done": own_done, "next_board": next_board.byte(), "history": history.bfloat16()}
        steps.append(fields | {"history_reset": history_reset, "oracle_id": oracle_id})
        outputs.append({"inputs": inputs, "legal": legal, "log_probs": log_probs, "goals": goals})
        final = {"return": env.final_return.clone(), "length": env.final_length.clone(), "prey": env.final_prey}
        episodes.append({"done": done} | final)
    outputs = stack_steps(outputs) | {"value": torch.stack(values, 1)}
    episodes = stack_steps(episodes, 0) | (stack_steps(probabilities, 0) if probabilities else {})
    return Transitions(**stack_steps(steps)), outputs, episodes


# ---- Model losses


class Replay:
    """A ring of R rollouts [R, M, T, E, ...] on the device, allocated when the first one comes in; of the histories, by
    far the largest, only those before each rollout's first step."""

    def __init__(self, rollouts: int, device):
        self.rollouts = rollouts
        self.data = None
        self.pushed = torch.zeros((), dtype=torch.int64, device=device)  # how many came in

    def push(self, transitions: Transitions) -> None:
        transitions = transitions._replace(history=transitions.history[:, :1])
        if self.data is None:
            self.data = Transitions(*(x.new_zeros(self.rollouts, *x.shape) for x in transitions))
        slot = (self.pushed % self.rollouts)[None]
        for kept, new in zip(self.data, transitions, strict=True):
            kept.index_copy_(0, slot, new[None])
        self.pushed.add_(1)

    def sample(self, count: int, window: int) -> Transitions:
        """Windows of so many whole rollouts [M, window * T, count, ...]; 0: single steps [M, count, ...]. Where nothing
        follows the first rollout yet, its last step is marked as the end of a game."""
        rollouts, m, steps, games = self.data.done.shape
        learner = torch.arange(m, device=self.pushed.device)[:, None]
        slot, step, column = torch.rand(3, m, count, device=self.pushed.device)
        slot = (slot * self.pushed.clamp(max=rollouts)).long()
        step, column = (step * steps).long(), (column * games).long()
        newest = slot == (self.pushed - 1) % rollouts
        if window:
            step = torch.arange(window * steps, device=step.device)[:, None]
            slot, learner, column = (slot[:, None] + step // steps) % rollouts, learner[:, None], column[:, None]
        found = Transitions(*(x[slot, learner, step % x.shape[2], column] for x in self.data))
        if window:
            found.done[:, steps - 1] |= newest
        return found

    def state_dict(self) -> dict:
        """Boards as bits"""
        saved = {} if self.data is None else self.data._asdict()
        for name in ("board", "next_board") if saved else ():
            saved[f"{name}_shape"] = torch.tensor(saved[name].shape)
            saved[name] = torch.from_numpy(np.packbits(saved[name].cpu().numpy()))
        return {"pushed": self.pushed} | saved

    def load_state_dict(self, saved: dict) -> None:
        game.copy_nested_({"pushed": self.pushed}, saved, "replay")
        if "board" not in saved:
            return
        data = {name: saved[name] for name in Transitions._fields}
        for name in ("board", "next_board"):
            shape = saved[f"{name}_shape"].tolist()
            data[name] = torch.from_numpy(np.unpackbits(saved[name].numpy(), count=math.prod(shape))).view(shape)
        if self.data is None:
            self.data = Transitions(*(x.to(self.pushed.device) for x in data.values()))
        game.copy_nested_(self.data._asdict(), data, "replay")


def sample_replays(replay: Replay, offline: Replay | None, offline_ratio: float, count: int, window: int):
    """As Replay.sample, a share of it from the rule-based games: at least one where it is neither 0 nor 1"""
    old = round(count * offline_ratio) if offline is not None else 0
    if offline is not None and 0 < offline_ratio < 1 and count > 1:
        old = min(max(old, 1), count - 1)
    shares = [(replay, count - old), (offline, old)]
    parts = [source.sample(number, window) for source, number in shares if number]
    return Transitions(*(torch.cat(fields, 2 if window else 1) for fields in zip(*parts, strict=True)))


def masked_mean(x, weight):
    """[M, ...] -> [M]: the mean where weight [M, ...] says that it counts"""
    return (x * weight).flatten(1).sum(1) / weight.flatten(1).sum(1).clamp(min=1e-6)


def mean_over_updates(found: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: x.detach().mean(0) for name, x in stack_steps(found, 0).items()} if found else {}


def same_game(done) -> torch.Tensor:
    """done [M, T, G] of windows -> bool [M, t, u, G, 1]: steps t and u belong to one game"""
    number = done.int().cumsum(1) - done.int()
    return (number[:, :, None] == number[:, None])[..., None]


def target_planes(config: StagHuntConfig, entities, walls):
    """[M, n, N + P], [M, n, _] -> float [M, n, C * H*W]: what the decoders reconstruct"""
    one_hot = torch.eye(config.num_cells + 1, config.num_cells, device=entities.device)[entities]
    players, stags, hares = one_hot.split([config.num_players, config.num_stags, config.num_hares], 2)
    walls = walls[:, :, None] if config.max_wall_pieces else torch.zeros_like(players[:, :, :1])
    return torch.cat([players, walls, stags.sum(2, keepdim=True), hares.sum(2, keepdim=True)], 2).flatten(2)


def encode_history(args: Args, env, networks: Networks, windows: Transitions, history):
    """Runs q_phi along windows [M, T, G, ...] from history [M, G, K, _] on. -> the co-players' entities, walls,
    legal actions and features [M, n = T*G*K, _], histories before each step [M, T, G, K, _] and after the last"""
    board, prey_position = windows.board.flatten(1, 2), windows.prey_position.flatten(1, 2)
    entities, walls, legal = (x[:, :, 1:].flatten(1, 2) for x in entity_views(args, env, board, prey_position))
    features = networks.inference(entities, walls, method="encoder")
    seen = windows.joint.long()[..., env.ego[1:]].flatten(1, 3)
    event = networks.inference(features, seen, method="event").unflatten(1, windows.history.shape[1:4])
    present = (entities[..., 0] < env.config.num_cells).view(event.shape[:-1])[..., None]
    discount = torch.where(windows.history_reset, 0.0, history_decay(args))[..., None, None]
    steps = (event * present, windows.done[..., None, None], discount)
    histories = []
    for step in zip(*(x.unbind(1) for x in steps), strict=True):
        histories.append(history)
        history = add_event(history, *step)
    return entities, walls, legal, features, torch.stack(histories, 1), history


def hindsight_goals(args: Args, env, networks, selection: str, windows: Transitions, goals, prior, present, done):
    """The subgoal that each co-player turned out to pursue, f_psi(s^g). windows [M, T, G, ...]; goals [M, T, G, K, D]
    as inferred. Of these and the following steps, U in all: prior [M, U, G, K, _], f_psi of each state; present bool
    [M, U, G, K]; done bool [M, U, G] -> parameters like prior, of T steps"""
    (m, steps, games, k), ends = goals.shape[:4], present.shape[1]
    clock = torch.arange(ends, device=present.device)
    now = clock[:steps, None]
    same = same_game(done)[:, :steps] & present[:, None]  # [M, T, U, G, K]

    def prior_of(step, otherwise):  # int64 [M, T, G, K], or otherwise the present one
        step = torch.where(otherwise, now[..., None], step)[..., None]
        return prior.gather(1, step.expand(*step.shape[:4], prior.shape[4]))

    if selection == "final":
        last = torch.where(same & (clock >= now)[..., None, None], clock[:, None, None], -1).amax(2)
        return prior_of(last, last < 0)
    later = now + torch.arange(1, args.subgoal_horizon + 1, device=present.device)  # [T, h]
    valid = same[:, now, later.clamp(max=ends - 1)] & (later < ends)[..., None, None]  # [M, T, h, G, K]
    candidate = goal_mean(args.goal_kind, prior)[:, later.clamp(max=ends - 1)]  # [M, T, h, G, K, D]
    # V(s_t, g): the critic's value if co-player j pursued the candidate and the others what is inferred of them
    own = torch.eye(k, dtype=torch.bool, device=present.device)[..., None]  # [j, K, 1]
    tried = torch.where(own, candidate[:, :, :, :, None], goals[:, :, None, :, None])  # [M, T, h, G, j, K, D]
    flat = Transitions(*(x.flatten(1, 2) for x in windows))
    entities, walls, _ = (x[:, :, 0] for x in entity_views(args, env, flat.board, flat.prey_position, 1))
    rest = (flat.time / env.config.final_time, flat.last_joint, goals.flatten(1, 2).flatten(2))
    x = networks.policy(policy_inputs(args, entities, walls, *rest), method="features")[..., : -k * goals.shape[4]]
    x = x.view(m, steps, 1, games, 1, -1).expand(*tried.shape[:5], -1)
    value = networks.policy(torch.cat([x, tried.flatten(5)], 5).flatten(1, 4), method="value").view(valid.shape)
    worst_first = value if selection == "conservative" else -value
    best = torch.where(valid, worst_first, math.inf).argmin(2)
    return prior_of((now[..., None] + 1 + best).clamp(max=ends - 1), ~valid.any(2))


def opponent_model_losses(args: Args, env, networks: Networks, windows, eps, pretraining=False, ahead: int = 0):
    """windows of T steps of G games [M, T, G, ...] -> dict of losses [M], means over the co-players' steps that count;
    `loss` is their sum: MOA's cross-entropy, reconstruction, KL(q_phi || f_psi(s^g)); in pretraining also f_psi's.
    ahead: so many more steps follow, in which games may go on and co-players may reach their subgoals"""
    whole, windows = windows, Transitions(*(x[:, : x.shape[1] - ahead] for x in windows))
    start = windows.history[:, 0].float()
    entities, walls, legal, features, history, _ = encode_history(args, env, networks, windows, start)
    shape, history = history.shape[:-1], history.flatten(1, 3)  # [M, T, G, K]; flattened: n = T*G*K rows
    kind, config, device = args.goal_kind, env.config, env.device
    posterior = networks.inference(features, history)
    whole_views = entity_views(args, env, whole.board.flatten(1, 2), whole.prey_position.flatten(1, 2))
    with torch.set_grad_enabled(pretraining and torch.is_grad_enabled()):
        prior = networks.prior(*(x[:, :, 1:].flatten(1, 2) for x in whole_views[:2]))
    present = (whole_views[0][:, :, 1:, 0] < config.num_cells).view(*whole.done.shape, -1)
    selection = args.subgoal_selection if args.subgoals == "inferred" and not pretraining else "final"
    with torch.no_grad():
        given = goal_mean(kind, posterior).view(*shape, -1), prior.view(*present.shape, -1), present, whole.done
        hindsight = hindsight_goals(args, env, networks, selection, windows, *given).flatten(1, 3)
    prior, present = prior[:, : posterior.shape[1]], present[:, : shape[1]]
    goal = sample_goal(kind, posterior, goal_noise(args, *posterior.shape[:2], device=device))
    # A subgoal outlasts a step: every second time MOA reads one that was inferred earlier in the game.
    same = same_game(windows.done)
    now = torch.arange(shape[1], device=device).view(1, -1, 1, 1)
    age = now - same.byte().argmax(2)  # steps since the game, or the window, began
    back = torch.rand(shape, device=device) * (age + 1) * (torch.rand(shape, device=device) < 0.5)
    earlier = F.one_hot(now - back.long(), shape[1]).float()  # a product: the gradient of gather differs run by run
    moa_goal = torch.einsum("mtgku,mugkd->mtgkd", earlier, goal.view(*shape, -1)).flatten(1, 3)
    use_hindsight = torch.rand(*posterior.shape[:2], 1, device=device) < eps
    moa_goal = torch.where(use_hindsight, goal_mean(kind, hindsight), moa_goal)
    if args.subgoals in GIVEN:
        moa_goal = windows.oracle_id.flatten(1, 3)
    if args.subgoals == "actions":
        moa_goal = goal_mean(kind, posterior)
    # Each co-player's game weighs the same, else those who wander about to the end drown those who go for their prey.
    if args.moa_data == "rewarded":
        present = present & (same_game(whole.done)[:, : shape[1]] & whole.exited[:, None, ..., 1:]).any(2)
    weight = (present / (same & present[:, None]).sum(2).clamp(min=1)).flatten(1)
    clock = (windows.time / config.final_time).flatten(1).repeat_interleave(shape[3], 1)
    action = windows.joint[..., 1:].flatten(1).long()[..., None]
    planes = target_planes(config, entities, walls)

    def moa_nll(moa, goal):
        return masked_mean(-moa(entities, walls, clock, goal, legal).gather(2, action)[..., 0], weight)

    def reconstruction(logits):
        return masked_mean(F.binary_cross_entropy_with_logits(logits, planes, reduction="none").mean(2), weight)

    losses = {"moa": moa_nll(networks.moa, moa_goal)}
    losses["recon"] = reconstruction(networks.inference(goal, history, method="reconstruct"))
    losses["kl"] = masked_mean(goal_kl(kind, posterior, hindsight), weight)
    losses["loss"] = losses["moa"]
    if args.subgoals != "actions":
        losses["loss"] = losses["moa"] + losses["recon"] + args.kl_coef * losses["kl"]
    if pretraining:
        goal = sample_goal(kind, prior, goal_noise(args, *prior.shape[:2], device=device))
        vae_kl = masked_mean(goal_kl(kind, prior, torch.zeros_like(prior)), weight)
        vae_loss = reconstruction(networks.prior(goal, method="reconstruct")) + args.kl_coef * vae_kl
        losses["loss"] = losses["loss"] + vae_loss + moa_nll(networks.moa_prior, goal)
    return losses


def make_optimizer(params: list[nn.Parameter], learning_rate: float, eps=1e-8, beta2=0.999) -> torch.optim.Adam:
    """Adam whose learning rate is a tensor and whose state stands in place, as a CUDA graph wants it"""
    rate = torch.tensor(learning_rate, device=params[0].device)
    optimizer = torch.optim.Adam(params, lr=rate, eps=eps, betas=(0.9, beta2), fused=True, capturable=True)
    for p in params:
        step = torch.zeros((), device=p.device)
        optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


def optimizer_step(optimizer: torch.optim.Adam, loss, max_norm: float) -> torch.Tensor:
    """One step down the sum of losses [M]. -> the norm of each learner's gradient [M], each clipped to max_norm"""
    optimizer.zero_grad()
    loss.sum().backward()
    grads = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
    if dist.is_initialized():
        flat = torch.cat([grad.flatten() for grad in grads]) / dist.get_world_size()
        dist.all_reduce(flat)
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))
    norms = torch.cat([grad.flatten(1) for grad in grads], 1).norm(dim=1)
    factor = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor.view(-1, *[1] * (grad.dim() - 1)))
    optimizer.step()
    return norms


def train_opponent_models(args: Args, env, networks, optimizer, replay, offline, eps, updates: int, pretraining=False):
    """-> mean losses [M]"""
    found = []
    for _ in range(updates):
        windows = sample_replays(replay, offline, args.offline_ratio, args.subgoal_batch_size, window=2)
        losses = opponent_model_losses(args, env, networks, windows, eps, pretraining, args.num_steps)
        found.append(losses | {"grad_norm": optimizer_step(optimizer, losses["loss"], 1.0)})
    return mean_over_updates(found)


def train_world_model(args: Args, config, networks, optimizer, replay, offline, updates: int):
    """-> mean losses [M]"""
    found = []
    for _ in range(updates):
        batch = sample_replays(replay, offline, args.offline_ratio, args.wm_batch_size, window=0)
        played = batch.board, batch.joint, batch.seat
        row_losses = networks.world(*played, batch.next_board, batch.reward, method="loss")
        loss = masked_mean(row_losses, learner_mask(config, batch.board))
        found.append({"loss": loss, "grad_norm": optimizer_step(optimizer, loss, 1.0)})
    return mean_over_updates(found)


# ---- Imagination


def learner_mask(config: StagHuntConfig, board) -> torch.Tensor:
    """[..., C, H, W] -> bool [...]: does the step count? The learner is on the board (prosocial: or has left it)."""
    present = board[..., 0, :, :].flatten(-2).amax(-1) > 0
    return torch.ones_like(present) if config.prosocial else present


def imagined_end(config: StagHuntConfig, board, next_board, time_next, first_hunt):
    """Boards [..., C, H, W] before and after a step, the clock after it -> has the learner's game ended, first_hunt"""
    taken = (next_board[..., -2:, :, :] < board[..., -2:, :, :]).flatten(-3).any(-1)
    first_hunt = torch.where(taken & (first_hunt < 0), time_next, first_hunt)
    ended = (time_next >= config.final_time) | (next_board[..., 0, :, :].flatten(-2).amax(-1) == 0)
    if config.steps_after_first_hunt is not None:
        ended |= (first_hunt >= 0) & (time_next - first_hunt >= config.steps_after_first_hunt)
    return ended, first_hunt


@compilable
def predict_step(args: Args, config: StagHuntConfig, world: Stacked, board, joint, seat):
    """board [M, n, C, H, W], joint [M, n, N], the learner's seat [M, n] -> the next board, the reward, clipped to the
    game's payoffs"""
    next_board, reward = world(board, joint, seat, method="predict")
    return next_board, reward.clamp(min(config.payoffs()), max(config.payoffs()))


def payoff_errors(config: StagHuntConfig, reward) -> torch.Tensor:
    """[...] -> [..., R]: how far it is from each payoff of the game"""
    return torch.stack([(reward - payoff).abs() for payoff in config.payoffs()], -1)


@torch.no_grad()
def measure_horizon(args: Args, config: StagHuntConfig, networks: Networks, transitions: Transitions):
    """Plays fresh games [M, T, E, ...], at most 1024, again in the world model, from the first collected step, with the
    actions that were played. -> for how many steps boards and payoffs are right [M], metrics [M]"""
    stride = math.ceil(transitions.done.shape[2] / 1024)
    games = Transitions(*(x[:, : args.imagination_horizon, ::stride] for x in transitions))
    valid = exact = paid = torch.ones_like(games.done[:, 0])
    board, trusted, metrics = games.board[:, 0], [], {}
    for k in range(games.done.shape[1]):
        valid = valid & learner_mask(config, games.board[:, k])
        reward = games.reward[:, k]
        played = games.joint[:, k], games.seat[:, k]
        next_board, next_reward = predict_step(args, config, networks.world, board, *played)
        off, next_off = (payoff_errors(config, x) for x in (reward, next_reward))
        exact = exact & (next_board == games.next_board[:, k]).flatten(2).all(2)
        paid = paid & (off.argmin(-1) == next_off.argmin(-1))
        metrics[f"wm/exact_match/{k + 1}"] = masked_mean(exact, valid)
        metrics[f"wm/payoff_match/{k + 1}"] = masked_mean(paid, valid)
        trusted.append((exact & paid & valid).sum(1) >= args.trust_exact_match * valid.sum(1))  # no game: trusted
        if k == 0:
            planes = networks.world(board, *played, method="expected_planes")
            squared = (planes - games.next_board[:, 0]).square().mean((3, 4))  # [M, E, C]
            metrics |= {f"wm/per_channel_mse/{c}": masked_mean(squared[..., c], valid) for c in range(squared.shape[2])}
            metrics["wm/obs_mse"] = masked_mean(squared.mean(2), valid)
            metrics["wm/reward_mse"] = masked_mean((next_reward - reward).square(), valid)
        board, valid = next_board, valid & ~games.done[:, k]
    unknown = payoff_errors(config, transitions.reward).amin(3)  # [M, T, E]
    metrics["wm/unknown_reward"] = (unknown * learner_mask(config, transitions.board)).flatten(1).amax(1)
    horizon = torch.stack(trusted, 1).int().cumprod(1).sum(1)
    return horizon, metrics | {"wm/horizon": horizon.float()}


@torch.no_grad()
def replayed_states(args: Args, env, networks: Networks, windows: Transitions) -> Transitions:
    """Windows [M, T, G, ...] -> states to imagine from [M, T*G, ...], with histories of the present q_phi"""
    *_, history, _ = encode_history(args, env, networks, windows, windows.history[:, 0].float())
    return Transitions(*(x.flatten(1, 2) for x in windows._replace(history=history)))


@torch.no_grad()
def imagine(args: Args, env, networks: Networks, start: Transitions, mask, horizon) -> dict[str, torch.Tensor]:
    """From real states `start` [M, n, ...] on, where mask bool [M, n], for at most horizon [M] steps. -> samples [M, h,
    n, ...] as make_ppo_batch reads them; `mask`: the rollout had neither ended nor been cut before the step"""
    config, samples, values = env.config, [], []
    board, last_joint, history = start.board, start.last_joint.long(), start.history.float()
    time_now, first_hunt = start.time.int(), start.first_hunt.int()
    for step in range(args.imagination_horizon + 1):
        clock = time_now / config.final_time
        views = entity_views(args, env, board, start.prey_position)
        belief = infer_opponents(args, env, networks, views, clock, history, start.oracle_id)
        inputs, legal, log_probs, value = evaluate_policy(args, networks.policy, views, clock, last_joint, belief.goals)
        values.append(value)
        if step == args.imagination_horizon:
            break
        noise = goal_noise(args, *belief.params.shape[:2], device=env.device)
        opponent_probs = predict_actions(args, networks, belief, clock, noise).exp()
        action = game.sample(log_probs.exp())
        joint = torch.cat([action[..., None], game.sample(opponent_probs)], 2)
        next_board, reward = predict_step(args, config, networks.world, board, joint, start.seat)
        mask = mask & (step < horizon)[:, None]
        time_now = time_now + 1
        ended, first_hunt = imagined_end(config, board, next_board, time_now, first_hunt)
        log_prob = log_probs.gather(2, action[..., None])[..., 0]
        sampled = {"inputs": inputs, "legal": legal, "action": action, "log_prob": log_prob}
        reward = shape_reward(args, config, reward, board, joint)
        samples.append(sampled | {"reward": reward, "ended": ended, "mask": mask})
        history = update_history(args, env, networks, belief, joint, history, torch.zeros_like(ended))
        board, last_joint, mask = next_board, joint, mask & ~ended
    return stack_steps(samples) | {"value": torch.stack(values, 1)}


# ---- PPO


def compute_gae(args: Args, reward, value, ended, mask) -> torch.Tensor:
    """reward, ended, mask [M, T, E], value [M, T + 1, E] -> advantages [M, T, E]. No value is taken from beyond an end;
    where a rollout is cut (the mask goes out without an end), the value there stands for the rest."""
    advantages = []
    ahead = torch.zeros_like(reward[:, 0])
    for t in reversed(range(reward.shape[1])):
        go_on = (~ended[:, t]).float()
        delta = reward[:, t] + args.gamma * go_on * value[:, t + 1] - value[:, t]
        ahead = delta + args.gamma * args.gae_lambda * go_on * ahead
        ahead = torch.where(mask[:, t], ahead, 0.0)  # what follows a cut is not known
        advantages.append(ahead)
    return torch.stack(advantages[::-1], 1)


def real_samples(args: Args, config: StagHuntConfig, transitions: Transitions, outputs: dict) -> dict:
    """The rollout [M, T, E, ...] as make_ppo_batch reads it"""
    action = transitions.joint[..., 0].long()
    ended = transitions.done if config.prosocial else transitions.done | transitions.exited[..., 0]
    reward = shape_reward(args, config, transitions.reward, transitions.board, transitions.joint)
    log_prob = outputs["log_probs"].gather(3, action[..., None])[..., 0]
    mask = learner_mask(config, transitions.board)
    return outputs | {"action": action, "log_prob": log_prob, "reward": reward, "ended": ended, "mask": mask}


def make_ppo_batch(args: Args, samples: dict[str, torch.Tensor], real: bool) -> dict[str, torch.Tensor]:
    """Samples [M, T, E, ...] -> [M, T*E, ...] with advantages, returns and weights"""
    batch = {name: samples[name] for name in ("inputs", "legal", "action", "log_prob", "reward")}
    value = samples["value"][:, :-1]
    advantages = compute_gae(args, samples["reward"], samples["value"], samples["ended"], samples["mask"])
    batch |= {"value": value, "advantage": advantages, "returns": advantages + value}
    batch["weight"] = samples["mask"].float() * (1.0 if real else args.imagined_weight)
    batch["critic_weight"] = batch["weight"] * float(real or args.critic_data == "mixed")
    batch["real"] = torch.full_like(batch["weight"], float(real))
    return {name: x.flatten(1, 2) for name, x in batch.items()}


def drop_masked(batch: dict[str, torch.Tensor], mask, least: int = 1) -> dict[str, torch.Tensor]:
    """batch [M, n, ...], mask bool [M, n]. On a CPU, where shapes may change: without rows that nobody counts"""
    if mask.is_cuda:
        return batch
    most = max(least, int(mask.sum(1).max()))
    order = mask.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
    return {name: x[torch.arange(len(x))[:, None], order] for name, x in batch.items()}


@compilable
def ppo_loss(args: Args, policy: Stacked, mb: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """mb [M, n, ...] -> each learner's loss [M], metrics [M]"""
    log_probs, value = policy(mb["inputs"], mb["legal"])
    log_ratio = log_probs.gather(2, mb["action"][..., None])[..., 0] - mb["log_prob"]
    ratio, weight = log_ratio.exp(), mb["weight"]
    advantage = mb["advantage"] - masked_mean(mb["advantage"], weight)[:, None]
    advantage = advantage / (masked_mean(advantage.square(), weight).sqrt()[:, None] + 1e-8)
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = masked_mean(torch.maximum(-advantage * ratio, -advantage * clipped), weight)
    value_error = 0.5 * (value - mb["returns"]).square()
    if args.clip_vloss:
        near = mb["value"] + (value - mb["value"]).clamp(-args.clip_coef, args.clip_coef)
        value_error = torch.maximum(value_error, 0.5 * (near - mb["returns"]).square())
    value_loss = masked_mean(value_error, mb["critic_weight"])
    entropy = masked_mean(-(log_probs.exp() * log_probs).sum(2), weight)
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    metrics["approx_kl"] = masked_mean(ratio - 1 - log_ratio, weight)
    metrics["clipfrac"] = masked_mean(((ratio - 1).abs() > args.clip_coef).float(), weight)
    metrics["value_loss_real"] = masked_mean(value_error, weight * mb["real"])
    metrics["value_loss_imagined"] = masked_mean(value_error, weight * (1 - mb["real"]))
    return loss, {name: x.detach() for name, x in metrics.items()}


def ppo_update(args: Args, policy: Stacked, optimizer, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """PPO on samples [M, n, ...]. -> means over all minibatches [M]"""
    batch = drop_masked(batch, batch["weight"] > 0, args.num_minibatches)
    found = []
    for _ in range(args.update_epochs):
        order = torch.rand(batch["weight"].shape[1], device=batch["weight"].device).argsort()
        for index in order.tensor_split(args.num_minibatches):
            loss, metrics = ppo_loss(args, policy, {name: x.index_select(1, index) for name, x in batch.items()})
            found.append(metrics | {"grad_norm": optimizer_step(optimizer, loss, args.max_grad_norm)})
    return {f"losses/{name}": x for name, x in mean_over_updates(found).items()}


# ---- Logging. Metrics are tensors on the device, [M] per learner, until MetricSums.read.

DETAILS = re.compile(  # logged only with --log-details
    r"per_agent/|moa/(recall|precision|top3|ece|.*/top1)|wm/(per_channel|reward_mse|unknown|\w+_match/([2-9]|1\d))"
    r"|losses/(value_loss_|\w+_grad_norm)|(real|imagined)/(\w+_std|samples)|time/ready"
)
PER_AGENT = ("real/samples", "imagined/samples", "omg/subgoal_norm", "losses/value_loss_real", "moa/nll", "moa/top1")


def episode_metrics(seats: game.Seats, episodes: dict) -> dict[str, torch.Tensor]:
    """Sums over the games that ended, per seed and seat [S, N]"""
    prey = episodes["prey"]
    done = episodes["done"][..., None].expand_as(prey)  # [T, B, N]
    found = {"games": done, "return": done * episodes["return"], "length": done * episodes["length"][..., None]}
    found |= {"stag": done & (prey == game.HUNT_STAG), "hare": done & (prey == game.HUNT_HARE)}
    return {f"games/{key}": x.float().unflatten(1, (seats.num_blocks, -1)).sum((0, 2)) for key, x in found.items()}


@torch.no_grad()
def moa_metrics(args: Args, env, seats, networks: Networks, transitions: Transitions, episodes: dict):
    """How well MOA predicts the co-players' actions in fresh games, on every 8th step, beside the best that can be
    known: their own probabilities (ceiling), and for rule-based players what follows from their past (bayes). ->
    metrics [M], confusion [M, true action, predicted]"""
    stride = min(transitions.done.shape[1], 8)
    steps = Transitions(*(x[:, stride - 1 :: stride].flatten(1, 2) for x in transitions))
    views = entity_views(args, env, steps.board, steps.prey_position)
    clock = steps.time / env.config.final_time
    belief = infer_opponents(args, env, networks, views, clock, steps.history, steps.oracle_id)
    noise = goal_noise(args, *belief.params.shape[:2], device=env.device)
    predicted = predict_actions(args, networks, belief, clock, noise).exp()
    action, weight = steps.joint[..., 1:].long()[..., None], belief.present.float()  # [M, n, K, 1], [M, n, K]

    def by_learner(probs):  # [T / 8, B, N, 7] -> [M, n, K, 7]
        return torch.stack([seats.to_learners(env.seats_to_ego(x))[:, :, 1:] for x in probs], 1).flatten(1, 2)

    metrics = {}
    ceilings = {"ceiling/": by_learner(episodes["probs"]), "bayes/": by_learner(episodes["posterior_probs"])}
    for name, probs in (ceilings | {"": predicted}).items():  # MOA last: `best` and `right` stay its own
        best = (probs == probs.amax(3, keepdim=True)).float()
        best = best / best.sum(3, keepdim=True)  # ties share
        right = best.gather(3, action)[..., 0]
        metrics[f"moa/{name}nll"] = masked_mean(-probs.gather(3, action)[..., 0].clamp(min=1e-9).log(), weight)
        metrics[f"moa/{name}top1"] = masked_mean(right, weight)
    metrics["moa/top3"] = masked_mean((predicted > predicted.gather(3, action)).sum(3) < 3, weight)
    confidence = predicted.amax(3)
    bins = F.one_hot((confidence.nan_to_num() * 15).long().clamp(0, 14), 15)
    gaps = (bins * (weight * (confidence - right))[..., None]).sum((1, 2))  # [M, 15]
    metrics["moa/ece"] = gaps.abs().sum(1) / weight.sum((1, 2)).clamp(min=1)
    taken = F.one_hot(action[..., 0], NUM_ACTIONS) * weight[..., None]
    metrics["moa/confusion"] = taken.flatten(1, 2).mT @ best.flatten(1, 2)
    metrics["omg/subgoal_norm"] = belief.goals.norm(dim=2).mean(1)
    return metrics


def batch_metrics(name: str, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Mean and deviation of reward, return and value of the samples that count"""
    weight = (batch["weight"] > 0).float()
    metrics = {f"{name}/samples": weight.sum(1)}

    def variance(x):
        return masked_mean((x - masked_mean(x, weight)[:, None]).square(), weight)

    for key, x in (("reward", batch["reward"]), ("return", batch["returns"]), ("value", batch["value"])):
        metrics |= {f"{name}/{key}_mean": masked_mean(x, weight), f"{name}/{key}_std": variance(x).sqrt()}
    if name == "real":
        total = variance(batch["returns"])
        explained = 1 - variance(batch["returns"] - batch["value"]) / total
        metrics["losses/explained_variance"] = explained.masked_fill(total < 1e-8, math.nan)  # nothing to explain
    return metrics


class MetricSums:
    """Sums of metrics since the last log, on the device"""

    def __init__(self):
        self.sums = {}  # name -> its sum and how often it was added

    def add(self, metrics: dict[str, torch.Tensor]) -> None:
        for name, x in metrics.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros_like(x, dtype=torch.float32), torch.zeros((), device=x.device)
        torch._foreach_add_([self.sums[name][0] for name in metrics], [x.float() for x in metrics.values()])
        torch._foreach_add_([self.sums[name][1] for name in metrics], 1.0)

    def read(self) -> dict[str, np.ndarray]:
        """The means since the last call, over all ranks: the only read from the device"""
        means = {name: (total / count).cpu().numpy() for name, (total, count) in self.sums.items() if count > 0}
        for total, count in self.sums.values():
            total.zero_()
            count.zero_()
        ranks = gather_ranks(means)
        return {name: sum(rank[name] for rank in ranks) / len(ranks) for name in means}


def log_row(args: Args, metrics: dict[str, np.ndarray], seed: int) -> dict[str, float]:
    """What seed number `seed` logs: `charts/` are means over the games that ended, the rest over its learners"""
    games = {key: metrics[f"games/{key}"][seed] for key in ("games", "return", "stag", "hare", "length")}  # [N]
    count = games["games"][0] or math.nan
    returns = games["return"] / count
    stag, hare = games["stag"].mean() / count, games["hare"].mean() / count
    own = returns[[name == "learner" for name in game.seats_table(args.seats, len(returns))]]
    row = {"charts/episodic_return": own.mean(), "charts/episodic_length": games["length"][0] / count}
    row |= {f"charts/episodic_return/player_{i}": value for i, value in enumerate(returns)}
    row |= {"charts/stag_share": stag, "charts/hare_share": hare, "charts/nothing_share": 1 - stag - hare}
    row["per_agent/return_gap"] = own.max() - own.min()
    for name, value in metrics.items():
        each = value.reshape(args.num_seeds, -1, *value.shape[1:])[seed]  # [learners, ...]
        if name == "moa/confusion":
            table = each.sum(0)
            for axis, label in ((1, "recall"), (0, "precision")):
                share = table.diagonal() / np.where(table.sum(axis) > 0, table.sum(axis), math.nan)
                row |= {f"moa/{label}/{a}": x for a, x in enumerate(share)}
        elif not name.startswith("games/"):
            row[name] = each.mean()
            if name in PER_AGENT:
                row |= {f"per_agent/{name.replace('/', '_')}/learner_{i}": x for i, x in enumerate(each)}
    return {name: float(value) for name, value in row.items()}


def find_explosion(args: Args, row: dict[str, float], networks: Networks) -> str | None:
    """A loss or a weight that is no number (a policy that is none plays actions that blow up MOA's loss, so these
    first) or has exploded, as a sentence"""
    checked = {name: x for name, x in row.items() if name.startswith(("losses/", "omg/"))}
    del checked["losses/explained_variance"]  # a ratio: no number where all returns are equal
    for name, stacked in networks._asdict().items():
        if stacked is not None:
            largest = torch.stack(torch._foreach_norm(list(stacked.state_dict().values()), math.inf))
            checked[f"the largest weight of {name}"] = float(largest.max())
    limit = 1e6 * max(1.0, *(abs(payoff) for payoff in args.config.payoffs())) ** 2  # losses are squares of payoffs
    for name in sorted(checked, key=lambda name: math.isfinite(checked[name])):
        if not abs(checked[name]) < limit:
            return f"{name} is {checked[name]}"
    if row.get("wm/unknown_reward", 0.0) > 1e-3:
        return "a reward is no payoff of the game: add a bonus in shape_reward, not to env.step"
    return None


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


def draw_pictures(samples: dict, metrics: dict, writers: list[SummaryWriter], step: int) -> None:
    """Histograms of real and imagined samples, and MOA's confusion matrix (row: what the co-player did)"""
    for seed, writer in enumerate(writers):
        for name in {"real", "imagined"} & samples.keys():
            own = {key: x.chunk(len(writers))[seed] for key, x in samples[name].items()}
            counts = own["weight"] > 0
            for key in ("reward", "returns", "value") if counts.any() else ():
                writer.add_histogram(f"{name}/{key}", own[key][counts].cpu(), step)
        if "moa/confusion" in metrics:
            table = np.split(metrics["moa/confusion"], len(writers))[seed].sum(0)
            picture = game.render_table(table / np.maximum(table.sum(1, keepdims=True), 1e-9), game.ACTION_NAMES)
            writer.add_image("moa/confusion", picture, step, dataformats="HWC")


# ---- Speed, files, ranks


def capture(function, env: StagHuntEnv, use: bool):
    """The same function; on a GPU the replay of one CUDA graph, whose result stays in place. Call it once before."""
    if not use or env.device.type == "cpu":
        return function
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(env.generator)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog may go on meanwhile
        result = function()

    def replay():
        graph.replay()
        return result

    return replay


class Timer:
    """Seconds of each stage. On a GPU the times are events, which a CUDA graph records at each replay."""

    def __init__(self, device):
        self.cuda, self.times = device.type == "cuda", []
        self.record("start")

    def record(self, name: str) -> None:
        now = torch.cuda.Event(enable_timing=True, external=True) if self.cuda else time.perf_counter()
        if self.cuda:
            now.record()
        self.times.append((name, now))

    def seconds(self) -> dict[str, float]:
        if self.cuda:
            torch.cuda.synchronize()
        found = collections.Counter()
        for (_, a), (name, b) in itertools.pairwise(self.times):
            found[f"time/{name}"] += a.elapsed_time(b) / 1000 if self.cuda else b - a
        return dict(found)


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


def init_ranks(device: torch.device) -> tuple[int, int, torch.device]:
    """Under torchrun: meets the other processes. -> this one's rank, how many there are, its device"""
    if "RANK" not in os.environ:
        return 0, 1, device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, device_id=device if device.type == "cuda" else None)
    return dist.get_rank(), dist.get_world_size(), device


def rank_share(args: Args, world: int) -> Args:
    """The games and batches of one of `world` ranks; a batch of two or more stays one, for games of either kind"""
    share = {
        name: math.ceil(getattr(args, name) / world) for name in ("num_envs", "subgoal_batch_size", "wm_batch_size")
    }
    for name in ("subgoal_batch_size", "wm_batch_size"):
        share[name] = max(share[name], min(2, getattr(args, name)))
    return dataclasses.replace(args, **share)


def gather_ranks(value) -> list:
    """What each rank has, once all have it"""
    if not dist.is_initialized():
        return [value]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def gather_on_first_rank(value) -> list | None:
    """What each rank has; the others get None"""
    if not dist.is_initialized():
        return [value]
    found = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, found)
    return found


# ---- One iteration


@dataclasses.dataclass
class TrainState:
    """All that a run changes"""

    args: Args
    env: StagHuntEnv
    seats: game.Seats
    networks: Networks
    optimizers: dict[str, torch.optim.Adam]
    rollout_state: dict[str, torch.Tensor]
    replay: Replay  # the learners' own last rollouts
    eps: torch.Tensor  # [] share of hindsight subgoals in MOA's training
    horizon: torch.Tensor  # int64 [M] how many steps may be imagined
    offline: "TrainState | None" = None  # rule-based games that the learners watch: their models must not forget them
    metrics: MetricSums = dataclasses.field(default_factory=MetricSums)

    def tensors(self) -> dict:
        networks = {name: x.state_dict() for name, x in self.networks._asdict().items() if x is not None}
        optimizers = {name: dict(enumerate(x.state.values())) for name, x in self.optimizers.items()}
        random = {"cpu": torch.get_rng_state()}
        if self.env.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.env.device)
        own = {"rollout_state": self.rollout_state, "eps": self.eps, "horizon": self.horizon, "random": random}
        if self.offline is not None:
            own["offline_rollout_state"] = self.offline.rollout_state
        return {"networks": networks, "optimizers": optimizers, **own}

    def parts(self) -> dict:
        parts = {"env": self.env, "seats": self.seats, "replay": self.replay}
        watched = {} if self.offline is None else self.offline.parts()
        return parts | {f"offline_{name}": part for name, part in watched.items()}

    def state_dict(self) -> dict:
        return self.tensors() | {name: part.state_dict() for name, part in self.parts().items()}

    def load_state_dict(self, saved: dict) -> None:
        """Everything in place, before a CUDA graph looks for it there"""
        game.copy_nested_(self.tensors(), saved)
        for name, part in self.parts().items():
            part.load_state_dict(saved.get(name))
        torch.set_rng_state(saved["random"]["cpu"])
        if self.env.device.type == "cuda":
            torch.cuda.set_rng_state(saved["random"]["cuda"], self.env.device)


def make_train_state(
    args: Args, tables: list[list[str]], seeds: list[int], device, rank=0, watch=False, stream=0
) -> TrainState:
    """Everything allocated. tables: who sits where, N names for each block of --num-envs games. watch: rule-based
    players play, the learners look on. stream: games of another number are other games"""
    torch.manual_seed(1_000_003 * seeds[0] + 7919 * rank + 97 * stream)
    env = StagHuntEnv(args.config, len(tables) * args.num_envs, device, torch.initial_seed() + 1, compile=args.compile)
    decay = history_decay(args)
    redraw = ("never" if decay else "game") if watch else args.redraw
    reset_prob = args.history_reset_prob if decay and args.subgoals == "posterior" else 0.0
    seats = game.Seats(env, tables, args.share_parameters, args.population, redraw, decay > 0, watch, reset_prob)
    m = seats.num_learners
    network_seeds = [100 * seed + i for seed in seeds for i in range(m // len(seeds))]
    networks = make_networks(args, args.config, network_seeds, device)
    optimizers = {"policy": make_optimizer(networks.policy.parameters(), args.learning_rate, eps=1e-5)}
    if networks.moa is not None:
        learned = networks.inference.parameters() + networks.moa.parameters()
        if watch:  # pretraining
            learned += networks.prior.parameters() + networks.moa_prior.parameters()
        optimizers["opponents"] = make_optimizer(learned, args.subgoal_learning_rate)
    if networks.world is not None:
        optimizers["world"] = make_optimizer(networks.world.parameters(), args.wm_learning_rate, beta2=0.99)
    replay, offline = Replay(args.replay_rollouts, device), None
    if networks.moa is not None and args.offline_ratio > 0 and not watch:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            half = dataclasses.replace(args, num_envs=math.ceil(args.num_envs / 2))
            offline = make_train_state(half, tables, seeds, device, rank, watch=True, stream=1)
        offline = dataclasses.replace(offline, networks=networks, optimizers={})
        offline.env.generator = env.generator  # a CUDA graph knows of one
    eps, horizon = torch.zeros((), device=device), torch.zeros(m, dtype=torch.int64, device=device)
    last_joint = torch.full((*seats.learner_seat.shape, env.config.num_players), STAY, device=device)
    history = torch.zeros(*last_joint.shape[:2], env.config.num_players - 1, 2 * args.subgoal_hidden, device=device)
    rollout_state = {"last_joint": last_joint, "history": history}
    return TrainState(args, env, seats, networks, optimizers, rollout_state, replay, eps, horizon, offline)


PRETRAINED = {  # flag -> the format of its checkpoint, the networks that it holds
    "vae_checkpoint": ("pretrain_vae.py 8", ("prior", "inference", "moa", "moa_prior")),
    "world_model_checkpoint": ("pretrain_world_model.py 8", ("world",)),
}


def check_pretrained(args: Args) -> None:
    """Refuses checkpoints of pretraining that are missing, damaged or do not fit"""
    here = vars(args) | vars(args.config) | {"world_model": WorldModel.__name__}
    for flag, (expected, _) in PRETRAINED.items():
        path = getattr(args, flag)
        if path is not None:
            start = f"--{flag.replace('_', '-')} {path}"
            game.find_checkpoint(path, f"--{flag.replace('_', '-')}")
            saved = load_checkpoint(path, expected, PRETRAINED_KEYS)
            for name, there in saved["must_match"].items():
                game.refuse(there != here.get(name), f"{start} does not fit: {name} {there}, here {here.get(name)}")
            try:
                load_pretrained(flag, args, make_networks(args, args.config, [0], torch.device("cpu")))
            except game.UserError as error:
                raise game.UserError(f"{start} does not fit: {error}") from error


def load_pretrained(flag: str, args: Args, networks: Networks) -> None:
    """Weights of a pretraining script. Seed s takes those of its seed s, from the first again where there are fewer"""
    expected, names = PRETRAINED[flag]
    saved = load_checkpoint(getattr(args, flag), expected, PRETRAINED_KEYS)["networks"]
    for name in names:
        weights = saved.get(name) or {}
        game.refuse(not weights, f"{name} is missing in what was saved")
        index = torch.arange(len(getattr(networks, name))) % min(len(x) for x in weights.values())
        getattr(networks, name).load_state_dict({key: x[index] for key, x in weights.items()})


def pretrain(args: Args, state: TrainState, seeds: list[int], rank: int) -> dict[str, float]:
    """One model per seed learns from games of rule-based players; each of its learners starts from a copy.
    -> metrics on fresh games"""
    table = game.seats_table(args.seats, args.config.num_players)
    watch_args = dataclasses.replace(args, num_envs=args.pretraining_games, share_parameters=True, compile=False)
    watch = make_train_state(watch_args, [table] * len(seeds), seeds, state.env.device, rank, watch=True, stream=2)
    networks, optimizers, replay = watch.networks, watch.optimizers, watch.replay
    rates = {"opponents": 3e-3} | ({"world": 2e-3} if networks.world is not None else {})
    if args.vae_checkpoint:
        load_pretrained("vae_checkpoint", args, networks)
        rates.pop("opponents")
    if args.world_model_checkpoint:
        load_pretrained("world_model_checkpoint", args, networks)
        rates.pop("world")

    def play():
        return rollout(watch_args, watch.env, watch.seats, networks, watch.rollout_state, args.num_steps, False)

    def learn():
        if "opponents" in rates:
            train_opponent_models(watch_args, watch.env, networks, optimizers["opponents"], replay, None, 0.0, 1, True)
        if "world" in rates:
            train_world_model(watch_args, args.config, networks, optimizers["world"], replay, None, 1)

    rounds = max(1, min(8, args.pretraining_updates // 10))
    for number in tqdm(range(rounds), desc="pretraining", unit="round", leave=False, disable=rank > 0):
        replay.push(play()[0])
        for name, rate in rates.items():  # falls along a cosine
            optimizers[name].param_groups[0]["lr"].fill_(rate * 0.5 * (1 + math.cos(math.pi * number / rounds)))
        for update in range(args.pretraining_updates // rounds):
            learn()
            if number == update == 0:
                play, learn = (capture(function, watch.env, args.cudagraphs) for function in (play, learn))
    index = torch.arange(len(seeds), device=state.env.device).repeat_interleave(state.seats.num_learners // len(seeds))
    for name, stacked in networks._asdict().items():
        if stacked is not None and name != "policy":
            tiled = {key: x[index] for key, x in stacked.state_dict().items()}
            getattr(state.networks, name).load_state_dict(tiled)
    for _ in range(args.replay_rollouts if state.offline is not None else 0):
        watch_rule_based(state.offline)
    transitions, _, episodes = play()
    metrics = moa_metrics(watch_args, watch.env, watch.seats, networks, transitions, episodes)
    if networks.world is not None:
        metrics |= measure_horizon(watch_args, args.config, networks, transitions)[1]
    return {name: float(x.mean()) for name, x in metrics.items() if name != "moa/confusion"}


def watch_rule_based(offline: TrainState) -> None:
    """A rollout of rule-based games, with the learners' present idea of who plays, for the offline replay"""
    args = offline.args
    parts = offline.env, offline.seats, offline.networks, offline.rollout_state
    offline.replay.push(rollout(args, *parts, args.num_steps, learners_act=False)[0])


def train_iteration(state: TrainState, train_world: bool, train_opponents: bool) -> dict:
    """One iteration; captured as one CUDA graph, nothing in it waits for the host. -> its samples and timer"""
    args, env, seats, networks = state.args, state.env, state.seats, state.networks
    timer = Timer(env.device)
    transitions, outputs, episodes = rollout(args, env, seats, networks, state.rollout_state, args.num_steps)
    metrics = episode_metrics(seats, episodes)
    timer.record("rollout")

    if networks.moa is not None:
        metrics |= moa_metrics(args, env, seats, networks, transitions, episodes)
    if networks.world is not None:  # on fresh steps, before they are trained on
        horizon, found = measure_horizon(args, env.config, networks, transitions)
        state.horizon.copy_(horizon)
        metrics |= found
    timer.record("measure")

    replays = state.replay, state.offline.replay if state.offline is not None else None
    if networks.moa is not None:
        state.replay.push(transitions)
    if train_world and networks.world is not None and args.wm_updates > 0:
        losses = train_world_model(args, env.config, networks, state.optimizers["world"], *replays, args.wm_updates)
        metrics |= {"losses/world_model": losses["loss"], "losses/world_model_grad_norm": losses["grad_norm"]}
    if train_opponents and networks.moa is not None and args.subgoal_updates > 0:
        optimizer = state.optimizers["opponents"]
        losses = train_opponent_models(args, env, networks, optimizer, *replays, state.eps, args.subgoal_updates)
        metrics |= {"losses/moa": losses["moa"], "omg/recon": losses["recon"], "omg/kl": losses["kl"]}
        metrics |= {"losses/opponent_models": losses["loss"], "losses/opponent_grad_norm": losses["grad_norm"]}
    timer.record("models")

    batch = make_ppo_batch(args, real_samples(args, env.config, transitions, outputs), real=True)
    metrics |= batch_metrics("real", batch)
    samples = {"transitions": transitions, "outputs": outputs, "real": batch, "timer": timer}
    if args.imagination and args.ppo_real_ratio < 1:
        real_ratio = args.ppo_real_ratio or 0.5  # 0: as many imagined samples as there would be real ones
        steps = args.num_steps * transitions.done.shape[2] * (1 - real_ratio) / real_ratio
        games = math.ceil(steps / args.imagination_horizon / args.num_steps)
        rule_based = 0.5 if args.imagined_goals == "prior" else 0.0
        games = max(games, 2 if rule_based else 1)  # one of each kind
        start = replayed_states(args, env, networks, sample_replays(*replays, rule_based, games, window=1))
        start = Transitions(**drop_masked(start._asdict(), learner_mask(env.config, start.board)))
        mask = learner_mask(env.config, start.board)
        imagined = make_ppo_batch(args, imagine(args, env, networks, start, mask, state.horizon), real=False)
        metrics |= batch_metrics("imagined", imagined)
        samples["imagined"] = imagined
        parts = [batch, imagined] if args.ppo_real_ratio > 0 else [imagined]
        batch = {name: torch.cat([part[name] for part in parts], 1) for name in batch}
    timer.record("imagine")

    metrics |= ppo_update(args, networks.policy, state.optimizers["policy"], batch)
    timer.record("ppo")
    state.metrics.add(metrics)
    return samples


# ---- Main


def main(args: Args) -> dict[str, float]:
    """Returns the last logged metrics, averaged over seeds."""
    started, iteration, seconds, checkpoint = time.time(), 0, 0.0, None
    config = validate(args)
    steps_each = args.num_envs * args.num_steps
    num_iterations = math.ceil(args.total_timesteps / steps_each)
    if args.resume is not None:
        args = dataclasses.replace(args, resume=str(game.find_checkpoint(args.resume, "--resume")))
        checkpoint = load_checkpoint(args.resume)
        check_resume(args, load_args(args.resume, checkpoint["args"]))
        iteration, seconds = checkpoint["iteration"], checkpoint["seconds"]
        over = iteration > num_iterations
        game.refuse(over, f"--total-timesteps {args.total_timesteps}: the run has {iteration * steps_each} already")
    if checkpoint is None or args.run_dir != checkpoint["args"]["run_dir"]:
        game.check_run_flags(args)
    rank, world, device = init_ranks(game.resolve_device(args.device))
    game.refuse(args.num_envs % world > 0, f"--num-envs {args.num_envs} must be a multiple of the {world} ranks")
    if checkpoint:
        states, kind = checkpoint["states"], checkpoint["device"]
        elsewhere = (kind, len(states)) != (device.type, world)
        game.refuse(elsewhere, f"--resume {args.resume} goes on on {len(states)} rank(s) on {kind} only")
    else:
        check_pretrained(args)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # sums in the same order in each run
    torch.backends.cuda.matmul.allow_tf32 = args.precision != "fp32"
    own_args = dataclasses.replace(rank_share(args, world), compile=args.compile and device.type == "cuda")
    game.check_memory(memory_needs(own_args), device)
    seeds = list(range(args.seed, args.seed + args.num_seeds))
    table = game.seats_table(args.seats, config.num_players)
    state = make_train_state(own_args, [table] * len(seeds), seeds, device, rank)
    say = tqdm.write if rank == 0 else lambda _: None
    loads = args.vae_checkpoint or args.world_model_checkpoint
    say(f"{config.setting}, {args.method}, {state.seats.num_learners} learner(s), on {world} x {device.type}")
    script = {"name": Path(__file__).name, "sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
    if checkpoint:
        try:
            state.load_state_dict(checkpoint["states"][rank])
        except game.UserError as error:
            raise game.UserError(f"--resume {args.resume}: {error}") from error
        if checkpoint["script"] != script:
            say(f"{args.resume} was made by another text than this script: {checkpoint['script'].get('name')}")
    elif state.networks.moa is not None and (args.pretraining_updates or args.offline_ratio or loads):
        say(f"pretraining the models on rule-based games, {args.pretraining_updates} updates")
        found = pretrain(own_args, state, seeds, rank)
        shown = (f"{name} {value:.4g}" for name, value in found.items() if not DETAILS.match(name))
        say(f"on fresh rule-based games: {', '.join(shown)}")

    def due(iteration):  # which models are trained
        return iteration % args.wm_period == 0, iteration % args.subgoal_period == 0

    kinds = {due(i) for i in range(math.lcm(args.wm_period, args.subgoal_period))}
    iterations = {kind: functools.partial(train_iteration, state, *kind) for kind in kinds}
    if state.offline is not None:
        iterations["watch"] = functools.partial(watch_rule_based, state.offline)
    if device.type == "cuda" and args.cudagraphs:  # warm up, put everything back, capture
        before = copy.deepcopy(state.state_dict())
        with torch.cuda.stream(torch.cuda.Stream()):
            for run_iteration in iterations.values():
                run_iteration()
        torch.cuda.synchronize()
        state.load_state_dict(before)
        state.metrics.read()
        iterations = {kind: capture(function, state.env, True) for kind, function in iterations.items()}

    def open_folders():
        found = [], []
        if rank == 0:
            found = held.enter_context(open_run(args, f"{config.setting}_{args.method}", checkpoint, step))
            say(f"ready after {ready:.1f} s; run folder {found[0][0]}")
        return gather_ranks(found[0])[0], found[1]

    def save(name="checkpoint.pt", **more):
        own_state = tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, state.state_dict())
        states = gather_on_first_rank(own_state)
        if rank == 0:
            content = {
                "format": FORMAT,
                "args": dataclasses.asdict(args),
                "iteration": iteration,
                "device": device.type,
                "states": states,
                "script": script,
                "folders": [folder.name for folder in folders],
                "seconds": seconds,
            }
            save_checkpoint(folders[0] / name, content | more)
        gather_ranks(None)  # nobody goes on, or ends, before it is written

    ready, step, rows, asked = time.time() - started, iteration * steps_each, [{}], False
    with contextlib.ExitStack() as held:
        folders, writers = open_folders() if checkpoint else ([], [])
        stop = held.enter_context(stop_requests())
        total = num_iterations * steps_each
        bar = tqdm(initial=step, total=total, unit="step", unit_scale=True, mininterval=1, disable=rank > 0)
        held.enter_context(bar)
        began, last_save = time.time() - seconds, time.time()
        while iteration < num_iterations and not asked:
            learning_rate = args.learning_rate * (1 - 0.9 * args.anneal_lr * iteration / num_iterations)
            state.optimizers["policy"].param_groups[0]["lr"].fill_(learning_rate)
            state.eps.fill_(args.hindsight_eps * max(0.0, 1 - 2 * iteration / num_iterations))
            if state.offline is not None and iteration % args.replay_rollouts == 0:
                iterations["watch"]()
            samples = iterations[due(iteration)]()
            iteration += 1
            asked = any(gather_ranks(bool(stop)))
            last = asked or iteration == num_iterations
            if iteration % args.log_every and not last:
                continue
            if not folders:  # the first thing on disk, now that everything is allocated
                folders, writers = open_folders()
            metrics, step = state.metrics.read(), iteration * steps_each
            seconds = time.time() - began
            rows = [log_row(args, metrics, seed) for seed in range(args.num_seeds)]
            extra = {"charts/SPS": step / seconds, "charts/learning_rate": learning_rate, "time/training": seconds}
            extra |= samples["timer"].seconds() | {"time/ready": ready}
            for folder, writer, row in zip(folders, writers, rows, strict=False):
                write_row(writer, folder / "metrics.jsonl", step, row | extra, args.log_details)
            for seed, row in zip(seeds, rows, strict=True):
                problem = find_explosion(args, row, state.networks)
                if problem:
                    save("checkpoint_bad.pt", problem=problem)
                    where = f"seed {seed}, iteration {iteration}; see {folders[0]}/checkpoint_bad.pt"
                    raise FloatingPointError(f"{problem} ({where})")
            shown = np.mean([[row["charts/episodic_return"], row["charts/stag_share"]] for row in rows], 0)
            bar.set_postfix_str("return {:.3f}, stag share {:.2f}".format(*shown), refresh=False)
            bar.update(step - bar.n)
            if last or gather_ranks(time.time() - last_save > args.save_seconds)[0]:
                save()
                last_save = time.time()
            pictures = args.num_pictures * iteration // num_iterations
            if writers and pictures > args.num_pictures * (iteration - args.log_every) // num_iterations:
                with never_fatal("draw"):
                    draw_pictures(samples, metrics, writers, step)
            began = time.time() - seconds  # pictures and checkpoints are no training
        flags = {name: str(value) for name, value in dataclasses.asdict(args).items()}
        for writer, row in zip(writers, rows if iteration == num_iterations else [], strict=False):
            with never_fatal("write to TensorBoard"):
                if row:
                    writer.add_hparams(flags, {"final_return": row["charts/episodic_return"]}, run_name=".")
    if asked and iteration < num_iterations:
        command = shlex.join(["python", sys.argv[0], "--resume", f"{folders[0]}/checkpoint.pt"])
        say(f"stopped; go on with: {command}")
        raise SystemExit(128 + (stop or [signal.SIGTERM])[0])
    say(f"{seconds:.1f} s of training after {ready:.1f} s of preparation; checkpoint {folders[0]}/checkpoint.pt")
    means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    return {"checkpoint": str(folders[0] / "checkpoint.pt"), **means}


if __name__ == "__main__":
    game.command_line(parse_args, main)
    if dist.is_initialized():
        dist.destroy_process_group()
