"""HOP+ on Stag Hunt, acting by search: the same hunters as in hopplus_ppo.py, who look ahead before they act. Thousands
of trees grow at once on the device; the policy learns from what the search finds.

    python hopplus_mcts.py                                        # HOP+ with tree search on 4x4
    python hopplus_mcts.py --method hop                           # HOP: goals stag or hare, Bayes' rule, the true rules
    python hopplus_mcts.py --root gumbel --num-simulations 32     # another root
    python hopplus_mcts.py --planner one-step                     # look one step ahead (none: act by the policy)
    python hopplus_mcts.py --resume runs/RUN/checkpoint.pt
    python hopplus_mcts.py --evaluate runs/RUN/checkpoint.pt --planner none
    python hopplus_mcts.py --adapt runs/RUN/checkpoint.pt         # frozen, searching, learning; also runs of hopplus_ppo.py
    python hopplus_mcts.py --cross-play runs/RUN/checkpoint.pt    # each seed's learners among those of the other seeds
    python hopplus_mcts.py --profile                              # where the time of a search goes
    torchrun --nproc-per-node 8 hopplus_mcts.py --num-envs 2048   # 8 GPUs of one machine
    torchrun --nproc-per-node 2 hopplus_mcts.py --device cpu      # two processes on CPUs
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 hopplus_mcts.py  # on both machines

`diff hopplus_ppo.py hopplus_mcts.py` shows what search changes.

Axes: S seeds, E games per learner, B = S*E games, N seats, M learners, T steps (in a search: trees), C planes, H W board, A
actions, D subgoal, K co-players. What a learner reads or predicts about players is in its ego order. `docs/hopplus_mcts.md`
explains every metric.
"""

import contextlib
import copy
import csv
import dataclasses
import functools
import io
import itertools
import json
import math
import os
import time
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.adam import adam
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from stag_hunt_env import (
    ACTION_NAMES,
    ALL_SEATS,
    HUNT_HARE,
    HUNT_STAG,
    NUM_ACTIONS,
    PLAYER_PROBS,
    STAY,
    STRANGER_PROBS,
    STRANGERS,
    StagHuntConfig,
    StagHuntEnv,
    StagHuntFlags,
    State,
    check_seats,
    command_line,
    pick,
    render_rgb,
    resolve_device,
    sample,
    write_gif,
)

METHODS = {
    "ppo": {"subgoals": "none", "imagination": False, "inter_episode_belief": False, "planner": "none"},
    "ppo-omg": {"subgoals": "inferred", "imagination": False, "inter_episode_belief": True, "planner": "none"},
    "hopplus": {"subgoals": "inferred", "imagination": True, "inter_episode_belief": True, "planner": "none"},
    "hopplus-mcts": {"subgoals": "inferred", "imagination": False, "inter_episode_belief": True, "planner": "mcts"},
    "hop": {"subgoals": "bayes", "imagination": False, "inter_episode_belief": True, "planner": "mcts"}
    | {"goal_kind": "discrete", "num_goals": 2, "num_trees": 5, "search_model": "env", "search_prior": 0.0},
}
SEARCH = {  # unless the method or the command line says otherwise
    **{"root": "puct", "num_simulations": 16, "num_trees": 2, "puct": 1.0, "q_temperature": 10.0, "search_prior": 1.0},
    **{"max_depth": 32, "search_model": "world-model", "policy_loss": "distill", "infer_in_tree": False},
}
BY_DEVICE = {  # what a GPU and what two CPU cores do well
    "cuda": {"num_envs": 256, "total_steps": 2_000_000, "subgoal_updates": 4, "model_games": 64}
    | {"pretraining_updates": 800, "pretraining_games": 1024, "policy_hidden": 128, "update_epochs": 4, "ppo_real_ratio": 0.2}
    | {"wm_updates": 4, "wm_batch_size": 1024, "imagination_horizon": 8, "subgoal_period": 1},
    "cpu": {"num_envs": 128, "total_steps": 250_000, "subgoal_updates": 2, "model_games": 8}
    | {"pretraining_updates": 200, "pretraining_games": 64, "policy_hidden": 64, "update_epochs": 4, "ppo_real_ratio": 0.6}
    | {"wm_updates": 2, "wm_batch_size": 256, "imagination_horizon": 5, "subgoal_period": 2}
    | {"num_simulations": 8, "num_trees": 1},
}
# what the methods that search take instead
SEARCHING = {
    "cuda": {"total_steps": 600_000},
    "cpu": {"total_steps": 80_000, "num_envs": 64, "imagination_horizon": 8, "subgoal_period": 1},
}
NS, NH, RANDOM = "nearest_stag", "nearest_hare", "random"
CO_PLAYERS = {  # whom --adapt meets
    "standard": {
        "3 NS": (NS, NS, NS),
        "3 NH": (NH, NH, NH),
        "3 random": (RANDOM, RANDOM, RANDOM),
        "NS + 2 NH": (NS, NH, NH),
        "2 NS + NH": (NS, NS, NH),
        "2 NS + random": (NS, NS, RANDOM),
        "NS + NH + random": (NS, NH, RANDOM),
    },
    "strangers": {
        "3 noisy NS": ("noisy_stag", "noisy_stag", "noisy_stag"),
        "3 noisy NH": ("noisy_hare", "noisy_hare", "noisy_hare"),
        "3 switching": ("switching", "switching", "switching"),
        "3 waiting": ("waiting", "waiting", "waiting"),
        "noisy NS + 2 noisy NH": ("noisy_stag", "noisy_hare", "noisy_hare"),
        "switching + waiting + random": ("switching", "waiting", RANDOM),
    },
}


@dataclasses.dataclass
class Args:
    exp_name: str = "hopplus_mcts"
    """first part of the run's name"""
    seed: int = 1
    """seed of the first experiment; the others count up from it"""
    num_seeds: int = 1
    """complete experiments side by side, each with its own weights and TensorBoard run; they share one stream of random
    numbers, so a seed's curve is another one in company, with the same statistics"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train; auto: on the GPU if there is one"""
    run_dir: str = "runs"
    """folder in which the runs' folders are made"""
    method: Literal["ppo", "ppo-omg", "hopplus", "hopplus-mcts", "hop"] = "hopplus-mcts"
    """a set of the flags below: plain PPO; with subgoals and memory; with these and imagination; with subgoals, memory and
    search; HOP, which knows the goals stag and hare and the true rules"""
    cudagraphs: bool = True
    """on a GPU: replay whole iterations as CUDA graphs"""
    compile: bool = False
    """on a GPU: fuse the game's step, policy, models, most of the search and PPO's loss with torch.compile; takes a minute
    or two at the start, for long runs"""
    precision: Literal["fp32", "tf32", "bf16"] = "tf32"
    """on a GPU: products of matrices in float32; with inputs rounded to 10 bits; in bfloat16 where learners act and imagine
    and PPO learns (the models learn in tf32)"""
    total_steps: int | None = None
    """env steps per seed (None: 600 000 on a GPU, 80 000 on a CPU; methods without search 2 million and
    250 000)"""
    num_envs: int | None = None
    """E, games per seed (None: 256 on a GPU, 64 on a CPU, there without search 128)"""
    num_steps: int = 32
    """T, steps of each game per iteration"""
    seats: str | None = None
    """who sits where, for example learner,nearest_stag,nearest_hare,random; mixed is a rule-based player drawn anew for each
    game; noisy_stag, noisy_hare, waiting and switching are strangers to the models (None: learners everywhere; --evaluate:
    as in training; --adapt: see --adapt-sets)"""
    share_parameters: bool = False
    """one set of networks for all learners of a seed"""
    log_every: int = 5
    """iterations between two lines in the logs"""
    save_every: int = 50
    """iterations between two checkpoints"""
    picture_every: int = 200
    """iterations between two sets of pictures and histograms in TensorBoard (0: only at the end)"""

    learning_rate: float = 1e-3
    """PPO: Adam's step size"""
    anneal_lr: bool = True
    """PPO: let it fall linearly to a tenth"""
    policy_hidden: int | None = None
    """PPO: width of the actor's and of the critic's two layers (None: 128 on a GPU, 64 on a CPU)"""
    update_epochs: int | None = None
    """PPO: passes over each batch (None: 4; --method ppo on a CPU: 3)"""
    num_minibatches: int = 4
    """PPO: minibatches per pass"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """PPO: weight of longer returns"""
    returns: Literal["gae", "mc"] = "gae"
    """generalised advantage estimation, or Monte Carlo (the value only stands in where the data is cut)"""
    clip_coef: float = 0.2
    """PPO: clip range of the ratio"""
    ent_coef: float = 0.03
    """PPO: weight of the entropy"""
    vf_coef: float = 0.5
    """PPO: weight of the value loss"""
    max_grad_norm: float = 0.5
    """clip each learner's gradient to this norm (the models': 1)"""

    subgoals: Literal["inferred", "hindsight", "oracle", "bayes", "none"] | None = None
    """what the policy reads about each co-player: q_phi's mean; for its updates the subgoal chosen in hindsight; which
    player sits there; HOP's belief, stag or hare by Bayes' rule (with --goal-kind discrete --num-goals 2); nothing (None: as
    the method says)"""
    goal_kind: Literal["continuous", "discrete"] | None = None
    """Gaussian subgoals, or categories drawn by straight-through Gumbel-softmax (None: continuous; hop: discrete)"""
    goal_dim: int = 16
    """D, the size of a continuous subgoal"""
    num_goals: int | None = None
    """K, the number of discrete subgoals (None: 8; hop: 2, stag and hare)"""
    temperature: float = 0.5
    """discrete: Gumbel-softmax temperature"""
    hidden: int = 64
    """width of the subgoal networks and the MOA"""
    subgoal_selection: Literal["conservative", "optimistic", "final"] = "conservative"
    """s^g among the next --subgoal-horizon states: the lowest or the highest V(s, g); or the last state before j left"""
    subgoal_horizon: int = 5
    """how many states ahead s^g is looked for"""
    hindsight_eps: float = 0.5
    """share of the MOA's training that reads hindsight subgoals instead of inferred ones, at the start; falls to 0 halfway"""
    kl_coef: float = 1e-4
    """weight of KL(q_phi || f_psi(s^g))"""
    moa_data: Literal["present", "rewarded", "all"] = "present"
    """steps that MOA and q_phi learn from: co-player on the board; and in a game in which it scored; all (the old mistake)"""
    inter_episode_belief: bool | None = None
    """keep the summary of each co-player from game to game (None: as the method says)"""
    memory_discount: float = 0.995
    """what of that summary is left at the start of the next game"""
    forget: float = 0.1
    """how often, in training, a learner forgets all of it after a game: else it never learns to play with strangers"""
    subgoal_learning_rate: float = 1e-3
    """q_phi and MOA: Adam's step size (in pretraining 3e-3, falling)"""
    subgoal_updates: int | None = None
    """q_phi and MOA: updates per training iteration (0: do not train them; None: 4 on a GPU, 2 on a CPU)"""
    subgoal_period: int | None = None
    """q_phi and MOA: train in every k-th iteration (None: 1; on a CPU without search 2)"""
    model_games: int | None = None
    """q_phi and MOA: windows of T steps per update and learner (None: 64 on a GPU, 8 on a CPU)"""
    rehearsal: float = 0.5
    """share of the models' samples that are rule-based games of the pretraining"""
    vae_checkpoint: str | None = None
    """start f_psi, q_phi and MOA from this checkpoint of pretrain_vae.py instead of pretraining here"""

    wm_head: Literal["structured", "pixel"] = "structured"
    """world model: a distribution over possible boards, or every cell by mean squared error"""
    wm_hidden: int = 128
    """world model: width of the hidden layers (the pixel head's are twice as wide)"""
    wm_ensemble: int = 1
    """world models per learner; an imagined game is cut where they disagree"""
    wm_channel_weights: tuple[float, ...] | None = None
    """pixel head: weight of each plane's error, for example 2 2 2 2 1 1 1 (None: all 1)"""
    wm_learning_rate: float = 1e-3
    """world model: Adam's step size (in pretraining 2e-3, falling)"""
    wm_updates: int | None = None
    """world model: updates per training iteration (0: do not train it; None: 4 on a GPU, 2 on a CPU)"""
    wm_period: int = 1
    """world model: train in every k-th iteration"""
    wm_batch_size: int | None = None
    """world model: transitions per update and learner (None: 1024 on a GPU, 256 on a CPU)"""
    world_model_checkpoint: str | None = None
    """start from this checkpoint of pretrain_world_model.py instead of pretraining here"""
    pretraining_updates: int | None = None
    """updates of each model on rule-based games before the first iteration (None: 800 on a GPU, 200 on a CPU)"""
    pretraining_games: int | None = None
    """rule-based games at a time, per seed (None: 1024 on a GPU, 64 on a CPU)"""
    replay_rollouts: int = 4
    """how many of the last iterations the models learn from and imagination starts from"""

    planner: Literal["mcts", "one-step", "none"] | None = None
    """how the learners act: by tree search; by looking one step ahead; by their policy (None: as the method says)"""
    root: Literal["puct", "gumbel"] | None = None
    """search: pUCT everywhere, or Gumbel MuZero: noise and halving at the root, improved policy below it (None: pUCT)"""
    num_simulations: int | None = None
    """search: simulations per tree (None: 16 on a GPU, 8 on a CPU)"""
    num_trees: int | None = None
    """search: trees per decision, each with other subgoals of the co-players; their Q are averaged (None: 2 on a GPU, 1 on a
    CPU; hop: 5)"""
    puct: float | None = None
    """search: pUCT's weight of the policy's priors, with Q in units of the highest payoff (None: 1)"""
    q_temperature: float | None = None
    """search: beta; it plays softmax(beta * Q + search_prior * log policy) (None: 10)"""
    search_prior: float | None = None
    """search: see there; the Gumbel root always has 1 (None: 1; hop: 0)"""
    max_depth: int | None = None
    """search: deepest a tree may grow (None: 32)"""
    search_model: Literal["env", "world-model"] | None = None
    """search: the game's own rules, or the learned world model, whatever its trust (None: world-model; hop: env)"""
    infer_in_tree: bool | None = None
    """search: infer the co-players' subgoals anew at every node, instead of once at the root (None: no)"""
    policy_loss: Literal["distill", "ppo"] | None = None
    """what the policy learns from steps that were searched: cross-entropy to the search's policy, or PPO (None: distill)"""
    profile: bool = False
    """only measure where the time of one search goes, phase by phase and kernel by kernel, and end"""

    imagination: bool | None = None
    """learn from imagined games too (None: as the method says)"""
    imagination_horizon: int | None = None
    """most steps of an imagined game (None: 8; on a CPU without search 5)"""
    trust: bool = True
    """imagine only as many steps as the world model gets right"""
    trust_exact_match: float = 0.99
    """trust: share of boards exactly right after k steps, on fresh games, that allows k steps"""
    ppo_real_ratio: float | None = None
    """share of real samples in PPO's batch, those imagined after an end included (1: plain PPO; None: 0.2 on a GPU, 0.6 on a
    CPU)"""
    critic_data: Literal["real", "mixed"] = "real"
    """what the critic learns from: real samples, or imagined ones too"""
    imagined_weight: float = 1.0
    """weight of an imagined sample beside a real one"""
    imagined_reward_clip: bool = True
    """clip imagined rewards to the game's payoffs"""

    resume: str | None = None
    """continue the run of this checkpoint, bit for bit, on the same kind of device; all other flags come from it"""
    evaluate: str | None = None
    """only play --eval-games with this checkpoint's learners, frozen, in --seats; the game and all else come from it, the
    flags of the search too unless they are given"""
    eval_games: int = 1000
    """--evaluate: games per seed; --cross-play: per pair of seeds"""
    adapt: str | None = None
    """let this checkpoint's learners meet co-players with whom their policies never trained (--seats with one learner, or
    --adapt-sets), see --adapt-modes. Read besides --adapt-* and the flags of the search: --seed, --learning-rate,
    --update-epochs, --num-minibatches, --ent-coef, --subgoal-learning-rate, --subgoal-updates, --total-steps (best
    responses)"""
    adapt_sets: Literal["standard", "strangers"] = "standard"
    """--adapt without --seats: seven sets of nearest_stag, nearest_hare and random, or six of players whom nobody, not even
    the models, trained with"""
    adapt_steps: int = 2400
    """--adapt: env steps with the same co-players"""
    adapt_repetitions: int = 64
    """--adapt: repetitions per set of co-players, spread over the seats"""
    adapt_every: int = 100
    """--adapt: env steps between two updates"""
    adapt_rounds: int = 4
    """--adapt: batches of imagined games per update"""
    adapt_games: int = 128
    """--adapt: imagined games in each batch"""
    adapt_modes: tuple[Literal["frozen", "search", "learning", "both"], ...] = ("frozen", "search", "learning")
    """--adapt: the learner as it is; searching; learning; searching and learning"""
    adapt_references: bool = True
    """--adapt: also measure a random player and train a best response to each set, to normalise the scores"""
    cross_play: str | None = None
    """seat a learner of each of this checkpoint's seeds among the learners of each seed, in every seat, frozen, searching as
    in --evaluate; a matrix
    of its returns"""
    config: StagHuntFlags = dataclasses.field(default_factory=StagHuntFlags)


# ---------------------------------------------------------------------------------------------------------------------
# Networks. M models are stored stacked, [M, in, out], and work in one operation.


class StackedLinear(nn.Module):
    def __init__(self, generators: list[torch.Generator], inputs: int, outputs: int, gain: float = 1.0):
        super().__init__()
        bound = gain * math.sqrt(3 / inputs)
        draws = [torch.rand(inputs, outputs, generator=generator) for generator in generators]
        self.weight = nn.Parameter((2 * torch.stack(draws) - 1) * bound)  # [M, in, out]
        self.bias = nn.Parameter(torch.zeros(len(generators), 1, outputs))

    def forward(self, x):  # [M, ..., in] -> [M, ..., out], in the precision of x
        rows, weight, bias = x.flatten(1, -2), self.weight.to(x.dtype), self.bias.to(x.dtype)
        result = in_parts(rows, weight, bias) if x.is_cuda else torch.baddbmm(bias, rows, weight)
        return result.view(*x.shape[:-1], -1)


def in_parts(rows, weight, bias):
    """rows [M, n, in] @ weight [M, in, out] + bias, for a GPU: as one long sum for each model, the weights' gradient would
    leave most of it idle"""
    (m, n, _), outputs = rows.shape, weight.shape[2]
    parts = math.gcd(n, 1 << max(1, n // 1024).bit_length() - 1)
    if padding(outputs):
        weight, bias = (F.pad(x, (0, padding(outputs))) for x in (weight, bias))
    if parts > 1:
        rows = rows.reshape(m * parts, n // parts, -1)
        weight, bias = (x.repeat_interleave(parts, 0) for x in (weight, bias))
    return (rows @ weight + bias).view(m, n, -1)[..., :outputs]


def padding(size: int) -> int:
    """How many zeros beside a layer's inputs or outputs: GPUs multiply matrices faster whose rows begin at multiples of 32
    bytes (of 16 in bfloat16)."""
    return -size % 8


class BoardEncoder(nn.Module):
    """A board as a list of things (see `things`) -> features. Each thing is looked up by its kind and its place relative to
    the observer; players add up, and among stags and among hares the largest value wins, so that the nearest can speak."""

    def __init__(self, config: StagHuntConfig, generators: list[torch.Generator], hidden: int):
        super().__init__()
        self.config = config
        n, cells, spots = config.num_players, config.num_cells, (2 * config.height - 1) * (2 * config.width - 1)
        row, column = np.divmod(np.arange(cells), config.width)
        spot = (row - row[:, None] + config.height - 1) * (2 * config.width - 1) + column - column[:, None] + config.width - 1
        self.rows = spots * (n + 2) + cells + 1  # the last row stands for things that are not there
        lookup = np.full((n + 2, cells + 1, cells + 1), self.rows - 1)  # [kind, own cell, its cell] -> row of the table
        lookup[:, :cells, :cells] = spot + spots * np.arange(n + 2)[:, None, None]
        lookup[0, :cells] = spots * (n + 2) + np.arange(cells)[:, None]  # the observer: its place on the board
        kinds = [*range(n), *[n] * config.num_stags, *[n + 1] * config.num_hares]
        self.register_buffer("lookup", torch.tensor(lookup), persistent=False)
        self.register_buffer("kind", torch.tensor(kinds), persistent=False)
        self.register_buffer("first", self.rows * torch.arange(len(generators)).view(-1, 1, 1), persistent=False)
        self.table = nn.Parameter(torch.stack([0.1 * torch.randn(self.rows, hidden, generator=g) for g in generators]))
        self.walls = StackedLinear(generators, cells, hidden) if config.max_wall_pieces else None
        self.mix = StackedLinear(generators, 3 * hidden, hidden, math.sqrt(2))
        self.out = StackedLinear(generators, hidden, hidden, math.sqrt(2))

    def forward(self, things, walls):
        """int64 [M, B, N + P], float [M, B, H*W] -> [M, B, hidden]"""
        config, nothing = self.config, self.table[:, -1:]
        row = self.lookup[self.kind, things[..., :1], things] + self.first[: len(things)]
        table = self.table.flatten(0, 1)

        def look(row, mode):  # [M, B, some] -> [M, B, hidden]
            if row.shape[2] == 0:
                return nothing.expand(-1, row.shape[1], -1)
            fast = row.is_cuda or mode == "sum"
            if fast and not torch.is_grad_enabled() and not torch.compiler.is_compiling():  # the same in one kernel
                return F.embedding_bag(row.flatten(0, 1), table, mode=mode).view(*row.shape[:2], -1)
            vectors = F.embedding(row, table)
            if row.shape[2] == 1:
                return vectors.squeeze(2)
            return vectors.sum(2) if mode == "sum" else vectors.amax(2)

        players, stags, hares = row.split([config.num_players, config.num_stags, config.num_hares], 2)
        seen = [look(players, "sum"), *(torch.maximum(look(prey, "max"), nothing) for prey in (stags, hares))]
        if self.walls is not None:
            seen[0] = seen[0] + self.walls(walls)
        return F.relu(self.out(F.relu(self.mix(torch.cat(seen, 2)))))


class SubgoalPrior(nn.Module):
    """f_psi: a VAE. State -> distribution over subgoals; subgoal -> state."""

    def __init__(self, config, generators, hidden, goal_size, parameters):
        super().__init__()
        self.encoder = BoardEncoder(config, generators, hidden)
        self.head = StackedLinear(generators, hidden, parameters)
        self.decoder = nn.ModuleList([StackedLinear(generators, goal_size, hidden, math.sqrt(2))])
        self.decoder.append(StackedLinear(generators, hidden, math.prod(config.observation_shape)))

    def forward(self, things, walls):
        return self.head(self.encoder(things, walls))

    def reconstruct(self, goal):
        return self.decoder[1](F.relu(self.decoder[0](goal)))


class SubgoalInference(nn.Module):
    """q_phi: a CVAE after OMG. The game up to t - 1, summed up, and the state s_t -> distribution over subgoals; subgoal and
    summary -> state. The summary adds up evidence, h <- decay * h + e(s, joint action), as Bayes adds up log-likelihoods."""

    def __init__(self, config, generators, hidden, goal_size, parameters):
        super().__init__()
        self.encoder = BoardEncoder(config, generators, hidden)
        self.register_buffer("one_hot", torch.eye(NUM_ACTIONS), persistent=False)
        self.event = nn.ModuleList()
        self.event.append(StackedLinear(generators, hidden + NUM_ACTIONS * config.num_players, hidden, math.sqrt(2)))
        self.event.append(StackedLinear(generators, hidden, hidden))
        self.decay = nn.Parameter(torch.full((len(generators), 1, hidden), 4.0))  # sigmoid: 0.98 a step
        self.mix = StackedLinear(generators, 2 * hidden, hidden, math.sqrt(2))
        self.head = StackedLinear(generators, hidden, parameters)
        self.decoder = nn.ModuleList([StackedLinear(generators, goal_size + hidden, hidden, math.sqrt(2))])
        self.decoder.append(StackedLinear(generators, hidden, math.prod(config.observation_shape)))

    def evidence(self, state, joint):
        """features of the encoder [M, n, hidden], joint action [M, n, N] -> what the step adds to the summary"""
        acts = F.embedding(joint, self.one_hot).flatten(2)
        return self.event[1](F.relu(self.event[0](torch.cat([state, acts], 2))))

    def forward(self, state, summary):
        """features of the encoder and summary of what came before, both [M, n, hidden] -> distribution parameters [M, n, _]"""
        return self.head(F.relu(self.mix(torch.cat([state, summary], 2))))

    def reconstruct(self, goal, summary):
        return self.decoder[1](F.relu(self.decoder[0](torch.cat([goal, summary], -1))))


class ActionModel(nn.Module):
    """MOA, pi_omega: state seen from j, clock and subgoal of j -> log-probabilities of j's action."""

    def __init__(self, config, generators, hidden, goal_size):
        super().__init__()
        self.encoder = BoardEncoder(config, generators, hidden)
        self.padding = padding(hidden + 1 + goal_size)
        self.mix = StackedLinear(generators, self.padding + hidden + 1 + goal_size, hidden, math.sqrt(2))
        self.out = StackedLinear(generators, hidden, hidden, math.sqrt(2))
        self.head = StackedLinear(generators, hidden, NUM_ACTIONS, 0.01)

    def forward(self, features, clock, goal, legal):
        """features of the encoder [M, n, hidden], clock [M, n], goal [M, n, _], legal bool [M, n, 7] -> [M, n, 7]"""
        nothing = features.new_zeros(()).expand(*clock.shape, self.padding)
        x = self.head(F.relu(self.out(F.relu(self.mix(torch.cat([nothing, features, clock[..., None], goal], 2))))))
        return x.masked_fill(~legal, -1e9).log_softmax(2)


class Models(nn.Module):
    def __init__(self, args: Args, config: StagHuntConfig, seeds: list[int]):
        super().__init__()
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        size = goal_size(args)
        parameters = 2 * size if args.goal_kind == "continuous" else size
        self.prior = SubgoalPrior(config, generators, args.hidden, size, parameters)
        self.inference = SubgoalInference(config, generators, args.hidden, size, parameters)
        self.moa_state = ActionModel(config, generators, args.hidden, size)
        self.moa = ActionModel(config, generators, args.hidden, size)


def goal_size(args: Args) -> int:
    return args.goal_dim if args.goal_kind == "continuous" else args.num_goals


def draw_goal(kind: str, parameters, noise, temperature: float):
    """Reparameterised: noise is standard normal, or Gumbel for discrete goals (straight through)."""
    if kind == "continuous":
        mean, spread = parameters.chunk(2, -1)
        return mean + noise * (0.5 * spread.clamp(-8, 4)).exp()
    soft = ((parameters + noise) / temperature).softmax(-1)
    return F.one_hot(soft.argmax(-1), soft.shape[-1]) + soft - soft.detach()


def divergence(kind: str, q, p=None):
    """KL(q || p) [...]; p None: standard normal, or uniform"""
    p = torch.zeros_like(q) if p is None else p
    if kind == "discrete":
        return (q.softmax(-1) * (q.log_softmax(-1) - p.log_softmax(-1))).sum(-1)
    (q_mean, q_spread), (p_mean, p_spread) = q.chunk(2, -1), p.chunk(2, -1)
    q_spread, p_spread = q_spread.clamp(-8, 4), p_spread.clamp(-8, 4)
    ratio = (q_spread - p_spread).exp() + (q_mean - p_mean).square() / p_spread.exp()
    return 0.5 * (ratio - 1 - q_spread + p_spread).sum(-1)


class Prediction(NamedTuple):
    """M models, B boards"""

    board: torch.Tensor  # uint8 [M, B, C, H, W] the most likely next board
    raw: torch.Tensor | None  # float [M, B, C, H, W] the numbers behind it
    reward: torch.Tensor  # [M, B]


class WorldModel(nn.Module):
    """Structured head. The rules are local, and so is the network: around each player it sees the 3x3 cells with everyone's
    action painted on them, and says where that player goes (one of 4 neighbours, stay, gone), whether the prey on its cell
    is taken and, for the observer, which payoff is paid. No weight belongs to a cell or a seat, so any board size will do,
    and whatever the weights, players cannot jump, split, fade or leave where no prey stands, prey cannot appear, and the
    reward is one that exists. Whether leavers, prey taken and payoff fit together is left to be learned."""

    def __init__(self, config: StagHuntConfig, generators: list[torch.Generator], hidden: int):
        super().__init__()
        self.config = config
        n, width, cells = config.num_players, config.width, config.num_cells
        row, column = np.divmod(np.arange(cells), width)
        down, right = row - row[:, None], column - column[:, None]  # [from, to]
        near = np.where((abs(down) <= 1) & (abs(right) <= 1), 3 * (down + 1) + right + 1, 9)
        around = np.full((cells, 9), cells)  # cell number `cells` lies off the board
        around[np.nonzero(near < 9)[0], near[near < 9]] = np.nonzero(near < 9)[1]
        target = around[:, [1, 7, 3, 5, 4]]  # where up, down, left, right and stay lead
        seat = np.arange(n)
        self.table("near", near)  # [H*W, H*W] -> which of the 9 cells around, 9: none
        self.table("around", around)  # [H*W, 9]
        self.table("target", target)  # [H*W, 5]
        self.table("outcome", np.array([4, 0, 4, 2, 4, 3, 4, 1, 4, 4])[near])  # [H*W, H*W] -> which move leads there
        self.table("order", (seat[:, None] + seat) % n)  # each player's own ego order
        self.table("codes", np.arange(9 * NUM_ACTIONS))  # who does what where
        self.table("one_hot", np.eye(cells + 1, cells), torch.float32)
        self.table("payoffs", np.array(list(config.payoffs())), torch.float32)
        # The player's own action, how many of the others do what where (a sum: two hunters differ from one), the board; and,
        # only where players differ in strength, who of the others does it.
        self.by_name = config.strengths is not None
        inputs = 9 * NUM_ACTIONS * (2 + self.by_name * (n - 1)) + 9 * 4
        self.padding = padding(inputs)
        self.layers = nn.ModuleList([StackedLinear(generators, self.padding + inputs, hidden, math.sqrt(2))])
        self.layers.append(StackedLinear(generators, hidden, hidden, math.sqrt(2)))
        # One head for each action of the player's own: a bystander is not mistaken for one of the party that it stands among.
        self.outcome_head = StackedLinear(generators, hidden, NUM_ACTIONS * 6, 0.01)
        self.prey_head = StackedLinear(generators, hidden, 1, 0.01)
        self.reward_head = StackedLinear(generators, hidden, NUM_ACTIONS * len(self.payoffs), 0.01)

    def table(self, name, values, dtype=torch.int64):
        self.register_buffer(name, torch.tensor(values, dtype=dtype), persistent=False)

    def read(self, board):
        """uint8 [M, B, C, H, W] -> planes [M, B, C, H*W], cell [M, B, N], present [M, B, N]"""
        planes = board.flatten(3)
        players = planes[:, :, : self.config.num_players]
        return planes, players.argmax(3), players.amax(3) > 0

    def forward(self, board, joint):
        """board uint8 [M, B, C, H, W] and joint action [M, B, N], both in the observer's ego order -> logits of each player's
        outcome [M, B, N, 6], of the prey on its cell being taken [M, B, N], of the observer's payoff [M, B, R]"""
        n = self.config.num_players
        planes, cell, present = self.read(board)
        both = present[..., None] & present[..., self.order]
        near = self.near[cell[..., None], cell[..., self.order]]  # [M, B, N, N]
        code = torch.where(both & (near < 9), near * NUM_ACTIONS + joint.long()[..., self.order], -1)
        own, *others = ((part[..., None] == self.codes).float() for part in code.unbind(3))  # each [M, B, N, 63]
        fixed = F.pad(planes[:, :, n:].float(), (0, 1, 0, 1))  # walls, stags, hares and one plane more; one cell more
        fixed[:, :, 3, :-1] = 1.0  # the board itself
        around = self.around[cell].flatten(2)  # [M, B, N * 9]
        patch = fixed.gather(3, around[:, :, None].expand(-1, -1, 4, -1)).unflatten(3, (n, 9)).transpose(2, 3)
        nothing = patch.new_zeros(()).expand(*cell.shape, self.padding)
        x = torch.cat([nothing, own, sum(others), patch.flatten(3), *others * self.by_name], 3)  # [M, B, N, inputs]
        for layer in self.layers:
            x = F.relu(layer(x))
        walls = F.pad(planes[:, :, n], (0, 1), value=1)
        blocked = walls.gather(2, self.target[cell].flatten(2)).view(*cell.shape, 5) > 0
        no_prey = planes[:, :, n + 1 :].amax(2).gather(2, cell) == 0  # nobody leaves from here
        blocked = torch.cat([blocked, no_prey[..., None]], 3)
        outcome = self.by_action(self.outcome_head(x), joint).masked_fill(blocked, -1e9)
        return outcome, self.prey_head(x).squeeze(3), self.by_action(self.reward_head(x[:, :, 0]), joint[:, :, 0])

    @staticmethod
    def by_action(logits, action):  # [..., 7 * outputs] -> [..., outputs]
        logits = logits.unflatten(-1, (NUM_ACTIONS, -1))
        index = action.long()[..., None, None].expand(*action.shape, 1, logits.shape[-1])
        return logits.gather(-2, index).squeeze(-2)

    def loss(self, board, joint, next_board, reward, weight):
        """[M]: the mean over the B boards, weighted by weight [M, B]"""
        n = self.config.num_players
        outcome, taken, payoff = self(board, joint)
        planes, cell, present = self.read(board)
        next_planes, next_cell, next_present = self.read(next_board)
        goes = torch.where(next_present, self.outcome[cell, next_cell], 5)
        prey, next_prey = (p[:, :, n + 1 :].amax(2).gather(2, cell).float() for p in (planes, next_planes))
        goes_loss = F.cross_entropy(outcome.movedim(3, 1), goes, reduction="none") * present
        taken_loss = F.binary_cross_entropy_with_logits(taken, prey - next_prey, reduction="none") * prey * present
        paid = (reward[..., None] - self.payoffs).abs().argmin(2)
        paid_loss = F.cross_entropy(payoff.movedim(2, 1), paid, reduction="none")
        return (((goes_loss + taken_loss).sum(2) + paid_loss) * weight).sum(1) / weight.sum(1).clamp(min=1)

    @torch.no_grad()
    def predict(self, board, joint, with_raw: bool = True) -> Prediction:
        n, cells = self.config.num_players, self.config.num_cells
        outcome, taken, payoff = self(board, joint)
        planes, cell, present = self.read(board)
        goes = torch.where(present, outcome.argmax(3), 5)
        goal = self.target[cell].gather(3, goes.clamp(max=4)[..., None])[..., 0]
        players = self.one_hot[torch.where(goes < 5, goal, cells)]
        here = self.one_hot[torch.where(present, cell, cells)]
        lost = (taken.sigmoid()[..., None] * here).amax(2, keepdim=True)  # [M, B, 1, H*W]
        prey = planes[:, :, n + 1 :].float()
        walls = planes[:, :, n : n + 1].float()
        new = torch.cat([players, walls, prey * (lost <= 0.5)], 2).to(torch.uint8).view(board.shape)
        raw = None
        if with_raw:
            places = self.one_hot[self.target[cell]]  # [M, B, N, 5, H*W]
            raw_players = ((outcome.softmax(3) * present[..., None])[..., :5, None] * places).sum(3)
            raw = torch.cat([raw_players, walls, prey * (1 - lost)], 2).view(board.shape)
        return Prediction(new, raw, self.payoffs[payoff.argmax(2)])


class PixelWorldModel(nn.Module):
    """The notes' head: an MLP that predicts every cell of every plane and the reward by mean squared error."""

    def __init__(self, config: StagHuntConfig, generators: list[torch.Generator], hidden: int, channel_weights=None):
        super().__init__()
        self.config = config
        size = math.prod(config.observation_shape)
        weights = torch.tensor(channel_weights or [1.0] * config.observation_shape[0]).view(-1, 1, 1)
        self.register_buffer("channel_weights", weights, persistent=False)
        self.layers = nn.ModuleList()
        for inputs in (size + NUM_ACTIONS * config.num_players, 2 * hidden, 2 * hidden):
            self.layers.append(StackedLinear(generators, inputs, 2 * hidden, math.sqrt(2)))
        self.head = StackedLinear(generators, 2 * hidden, size + 1)

    def forward(self, board, joint):
        x = torch.cat([board.flatten(2).float(), F.one_hot(joint.long(), NUM_ACTIONS).flatten(2).float()], 2)
        for layer in self.layers:
            x = F.relu(layer(x))
        x = self.head(x)
        return x[..., :-1].view(board.shape), x[..., -1]

    def loss(self, board, joint, next_board, reward, weight):
        raw, paid = self(board, joint)
        squared = (raw - next_board.float()).square() * self.channel_weights
        each = squared.mean((3, 4)).sum(2) + (paid - reward).square()
        return (each * weight).sum(1) / weight.sum(1).clamp(min=1)

    @torch.no_grad()
    def predict(self, board, joint, with_raw: bool = True) -> Prediction:
        raw, paid = self(board, joint)
        return Prediction((raw > 0.5).to(torch.uint8), raw, paid)


def make_world_model(args: Args, config: StagHuntConfig, num_models: int, seeds: list[int], device) -> nn.Module:
    members = num_models // len(seeds)
    generators = [torch.Generator().manual_seed(1000 * seed + member) for seed in seeds for member in range(members)]
    if args.wm_head == "structured":
        return WorldModel(config, generators, args.wm_hidden).to(device)
    return PixelWorldModel(config, generators, args.wm_hidden, args.wm_channel_weights).to(device)


class ActorCritic(nn.Module):
    """pi(a | own board, clock, last joint action, subgoals of the co-players) and V of the same."""

    def __init__(self, config: StagHuntConfig, generators, hidden: int, goal_inputs: int, precision=torch.float32):
        super().__init__()
        self.register_buffer("one_hot", torch.eye(NUM_ACTIONS, dtype=precision), persistent=False)
        inputs = math.prod(config.observation_shape) + 1 + NUM_ACTIONS * config.num_players + goal_inputs
        self.padding = padding(inputs)
        self.actor, self.critic = nn.ModuleList(), nn.ModuleList()
        for layers, outputs, gain in ((self.actor, NUM_ACTIONS, 0.01), (self.critic, 1, 1.0)):
            layers.append(StackedLinear(generators, inputs + self.padding, hidden, math.sqrt(2)))
            layers.append(StackedLinear(generators, hidden, hidden, math.sqrt(2)))
            layers.append(StackedLinear(generators, hidden, outputs, gain))

    def inputs(self, board, clock, last_joint, goals):
        """uint8 [M, n, C, H, W], [M, n], [M, n, N], [M, n, K*D] -> [M, n, inputs]"""
        acts = self.one_hot[last_joint.int()].flatten(2)
        nothing = acts.new_zeros(()).expand(*acts.shape[:2], self.padding)
        return torch.cat([x.to(acts.dtype) for x in (nothing, board.flatten(2), clock[..., None], acts, goals)], 2)

    def act(self, board, clock, last_joint, goals, legal):
        """-> inputs, log-probabilities, values"""
        x = self.inputs(board, clock, last_joint, goals)
        return x, *self(x, legal)

    def value(self, x):
        for layer in self.critic[:-1]:
            x = F.relu(layer(x))
        return self.critic[-1](x).squeeze(-1).float()

    def forward(self, x, legal):
        """-> log-probabilities [M, n, 7], values [M, n]"""
        value = self.value(x)
        for layer in self.actor[:-1]:
            x = F.relu(layer(x))
        return self.actor[-1](x).float().masked_fill(~legal, -1e9).log_softmax(-1), value


class Nets(NamedTuple):
    """What M learners own; None where a flag switches it off"""

    policy: ActorCritic
    models: Models | None  # f_psi, q_phi, MOA
    world: nn.Module | None  # M * wm_ensemble world models


# ---------------------------------------------------------------------------------------------------------------------
# Who sits where


class Seating(NamedTuple):
    """S blocks of E games. `[S*E, N, ...] <-> [M, E, ...]` is done here and nowhere else."""

    blocks: int
    games: int
    block: torch.Tensor  # [learner seats of all blocks] which block
    seat: torch.Tensor  # and which seat
    kinds: torch.Tensor  # [S, N] number in PLAYER_PROBS and on in STRANGER_PROBS, LEARNER, MIXED or SWITCHING
    place: torch.Tensor  # [S, N] which of the learner seats, 0 where no learner sits
    share: bool  # the learners of a block are one
    rule_based: bool  # somebody is no learner
    mixed: bool  # somebody is drawn anew for each game
    strangers: bool  # somebody is one of STRANGERS

    def to_learners(self, x):
        """[S*E, N, ...] -> [M, E, ...] (shared: E is the games of all seats, seat by seat)"""
        x = x.unflatten(0, (self.blocks, self.games)).movedim(2, 1)  # [S, N, E, ...]
        x = x[self.block, self.seat] if self.rule_based else x.flatten(0, 1)
        return x.unflatten(0, (self.blocks, -1)).flatten(1, 2) if self.share else x

    def each(self, x):
        """[S*E, ...], the same for all seats -> [M, E, ...]"""
        x = x.unflatten(0, (self.blocks, self.games))[self.block]
        return x.unflatten(0, (self.blocks, -1)).flatten(1, 2) if self.share else x

    def to_seats(self, x, others):
        """[M, E, ...] -> [S*E, N, ...], with `others` where no learner sits"""
        x = x.reshape(len(self.seat), self.games, *x.shape[2:])
        if not self.rule_based:
            return x.unflatten(0, (self.blocks, -1)).movedim(1, 2).flatten(0, 1)
        learns = (self.kinds == LEARNER).repeat_interleave(self.games, 0)
        return torch.where(learns.view(*learns.shape, *[1] * (x.dim() - 2)), x[self.place].movedim(1, 2).flatten(0, 1), others)


LEARNER, MIXED, SWITCHING = -1, -2, -3


def seat_kinds(names: list[str]) -> list[int]:
    others = {"learner": LEARNER, "mixed": MIXED, "switching": SWITCHING}
    return [others.get(name, [*PLAYER_PROBS, *STRANGER_PROBS, name].index(name)) for name in names]


def make_seating(kinds: list[list[int]], games: int, share: bool, device) -> Seating:
    table = torch.tensor(kinds, device=device)
    block, seat = (table == LEARNER).nonzero(as_tuple=True)
    found, learns = {kind for row in kinds for kind in row}, (table == LEARNER).flatten()
    place = torch.where(learns, learns.cumsum(0) - 1, 0).view(table.shape)
    strangers = SWITCHING in found or max(found) >= len(PLAYER_PROBS)
    return Seating(len(kinds), games, block, seat, table, place, share, found != {LEARNER}, MIXED in found, strangers)


# ---------------------------------------------------------------------------------------------------------------------
# What a learner makes of a board, real or imagined


def all_views(env: StagHuntEnv, board: torch.Tensor, prey: torch.Tensor):
    """board uint8 [M, n, C, H, W], the cells where prey stood at the start int64 [M, n, P] -> the board as each player sees
    it, a list of things int64 [M, n, N, N + P], walls float [M, n, N, H*W] and everybody's legal actions bool [M, n, N, 7]"""
    config, n, nowhere = env.config, env.config.num_players, env.config.num_cells
    planes = board.flatten(3)
    players = planes[:, :, :n]
    cell, present = players.argmax(3), players.amax(3) > 0
    place = torch.where(present, cell, nowhere)[..., env.ego]
    stags, hares = planes[:, :, n + 1], planes[:, :, n + 2]
    split = prey.split([config.num_stags, config.num_hares], 2)
    alive = torch.cat([stags.gather(2, split[0]), hares.gather(2, split[1])], 2) > 0
    things = torch.cat([place, torch.where(alive, prey, nowhere)[:, :, None].expand(-1, -1, n, -1)], 3)
    target = env.target[cell]  # [M, n, N, 7]
    free = planes[:, :, n].gather(2, target.flatten(2)).view(target.shape) == 0
    here = torch.stack([stags.gather(2, cell), hares.gather(2, cell)], 3) > 0
    able = torch.cat([(env.possible[cell] & free)[..., :5], here], 3) & present[..., None]
    walls = planes[:, :, n, None].expand(-1, -1, n, -1).float() if config.max_wall_pieces else planes[:, :, :n, :1].float()
    return things, walls, able | env.is_stay


def views_of_others(env: StagHuntEnv, board: torch.Tensor, prey: torch.Tensor):
    """`all_views` of the K others, board [M, ..., C, H, W]: things, walls and legal actions, each [M, n * K, ...]"""
    return (x[:, :, 1:].flatten(1, 2) for x in all_views(env, board.flatten(1, -4), prey.flatten(1, -2).long()))


class Thought(NamedTuple):
    """What a learner holds about its K co-players at one step"""

    goals: torch.Tensor  # [M, n, K*D] for the policy
    expected: torch.Tensor  # [M, n, K, 7] log-probabilities of what each will do, by MOA
    state: torch.Tensor  # [M, n*K, hidden] q_phi's features (bayes: [M, n*K, goals * 7] what each would do to each end)
    present: torch.Tensor  # bool [M, n, K] on the board
    legal: torch.Tensor  # bool [M, n, 7] the learner's own


def goal_mean(args: Args, parameters):
    return parameters.chunk(2, -1)[0] if args.goal_kind == "continuous" else parameters.softmax(-1)


def goal_noise(args: Args, shape, generator):
    if args.goal_kind == "continuous":
        return torch.randn(*shape, args.goal_dim, generator=generator, device=generator.device)
    uniform = torch.rand(*shape, args.num_goals, generator=generator, device=generator.device)
    return -torch.log(-torch.log(uniform.clamp(1e-6, 1 - 1e-6)))


def think(args: Args, env, models: Models, board, prey, clock, summary, told, generator, expect: bool = True) -> Thought:
    """board [M, n, C, H, W], prey [M, n, P], clock [M, n], summary [M, n, K, hidden] of each co-player's past, told
    [M, n, K, D] (which player it is, for --subgoals oracle). Without `expect` MOA is not asked."""
    m, n, k = summary.shape[:3]
    noise = goal_noise(args, (m, n * k), generator) if expect else None
    return fused(think_with, args, env.device)(args, env, models, board, prey, clock, summary, told, noise)


def think_with(args: Args, env: StagHuntEnv, models: Models, board, prey, clock, summary, told, noise) -> Thought:
    """The same, with noise [M, n*K, D] or None from outside: compiled functions do not draw random numbers"""
    things, walls, legal = all_views(env, board, prey)
    m, n, k = legal.shape[0], legal.shape[1], legal.shape[2] - 1
    things, walls = things[:, :, 1:].flatten(1, 2), walls[:, :, 1:].flatten(1, 2)
    clock, able = clock.repeat_interleave(k, 1), legal[:, :, 1:].flatten(1, 2)
    if noise is not None or args.subgoals == "bayes":
        features = models.moa.encoder(things, walls)
    if args.subgoals == "bayes":
        state = acts_by_goal(args, models, features, clock, able).flatten(2)
    else:
        state = models.inference.encoder(things, walls)
    posterior = believe(args, models, state, summary.flatten(1, 2).float())
    goals = told.flatten(1, 2) if args.subgoals == "oracle" else goal_mean(args, posterior)
    expected = posterior[..., :0]
    if noise is not None:
        drawn = goals if args.subgoals == "oracle" else draw_goal(args.goal_kind, posterior, noise, args.temperature)
        expected = models.moa(features, clock, drawn, able)
    goals = goals.reshape(m, n, -1)[..., : 0 if args.subgoals == "none" else None]
    present = (things[..., 0] < env.config.num_cells).view(m, n, k)
    return Thought(goals, expected.view(m, n, k, -1), state, present, legal[:, :, 0])


def acts_by_goal(args: Args, models: Models, features, clock, legal) -> torch.Tensor:
    """[M, n, goals, 7] MOA's log-probabilities of what a co-player does that pursues each of the discrete goals"""
    m, n = clock.shape
    each = torch.eye(args.num_goals, device=clock.device).repeat(m, n, 1)
    repeated = (x.repeat_interleave(args.num_goals, 1) for x in (features, clock))
    return models.moa(*repeated, each, legal.repeat_interleave(args.num_goals, 1)).view(m, n, args.num_goals, -1)


def believe(args: Args, models: Models, state, summary) -> torch.Tensor:
    """What is believed of each co-player's subgoal [M, n, _]: q_phi's parameters, or log-probabilities of stag and hare: how
    well each explains what was done in this game, and how often each was pursued in those before"""
    if args.subgoals != "bayes":
        return models.inference(state, summary)
    explains, pursued = summary.chunk(2, 2)
    return (explains + (1 + pursued).log()).log_softmax(2)


def next_game(args: Args, summary) -> torch.Tensor:
    """What is left of summaries [..., hidden] at the start of the next game"""
    if args.subgoals != "bayes":
        return memory(args) * summary
    explains, pursued = summary.chunk(2, -1)
    belief = (explains + (1 + pursued).log()).softmax(-1)
    return torch.cat([torch.zeros_like(explains), memory(args) * (pursued + belief)], -1)


def remember(args: Args, env: StagHuntEnv, models: Models, thought: Thought, joint, summary, done):
    """The summaries [M, n, K, hidden] after joint action [M, n, N]: a co-player that has left adds nothing; where the game is
    over, what is left of them for the next."""
    if args.subgoals == "bayes":
        acts = thought.state.view(*thought.present.shape, args.num_goals, NUM_ACTIONS)
        done_by_each = joint.long()[..., 1:, None, None].expand(*acts.shape[:-1], 1)
        after = summary + F.pad(acts.gather(4, done_by_each)[..., 0].clamp(min=-10), (0, args.num_goals))
    else:
        event = models.inference.evidence(thought.state, joint.long()[..., env.ego[1:]].flatten(1, 2)).view(summary.shape)
        after = models.inference.decay.sigmoid()[:, :, None] * summary + event
    summary = torch.where(thought.present[..., None], after, summary)
    return torch.where(done[..., None, None], next_game(args, summary), summary)


def memory(args: Args) -> float:
    """What is left of a summary in the next game: nothing if that may be with somebody else."""
    return args.memory_discount if args.inter_episode_belief and "mixed" not in args.seats else 0.0


def identity(args: Args, kinds) -> torch.Tensor:
    """[..., D] who sits there, for --subgoals oracle; nothing of a stranger"""
    number = torch.where(kinds < len(PLAYER_PROBS), kinds - MIXED, -1)
    return (number[..., None] == torch.arange(goal_size(args), device=kinds.device)).float()


# ---------------------------------------------------------------------------------------------------------------------
# Search: T trees at once in flat tensors, one tree per learner, game and goal sample. Only the learner's own actions branch.
# Every tree walks in step with the others; a walk that is over repeats its last node, and what it writes there goes to a
# spare node. So shapes are static, and nothing waits for the host.


class Position(NamedTuple):
    """What a node stands for, each [T, ...] (in a tree: [T, nodes, ...]), in the learner's ego order"""

    board: torch.Tensor  # uint8 [C, H, W]
    time: torch.Tensor
    first_hunt: torch.Tensor
    last_joint: torch.Tensor  # [N]
    summary: torch.Tensor  # [K, hidden] --infer-in-tree: of each co-player's past
    state: torch.Tensor  # [K, _] --infer-in-tree: what `remember` needs besides


class Leaf(NamedTuple):
    """What the networks say about positions"""

    logits: torch.Tensor  # [T, A] log of the policy, ILLEGAL where an action is
    value: torch.Tensor  # [T]
    expected: torch.Tensor  # [T, K, A] probabilities of the co-players' actions, by MOA
    position: Position  # the position, with what was found out about it


class Tree(NamedTuple):
    """Node 0 is the root; simulation k adds node k + 1; the last node is the spare one."""

    edges: torch.Tensor  # [T, nodes, 4, A] visits, sum of returns, log of the policy, child (0: none yet)
    nodes: torch.Tensor  # [T, nodes, 3] value, reward on the way here, ended
    best: torch.Tensor  # int64 [T, nodes] the action to try next
    follow: torch.Tensor  # int64 [T, nodes] and the node it leads to; the same node where the walk ends
    expected: torch.Tensor  # [T, nodes, K, A]
    position: Position


ILLEGAL = -1e9
C_VISIT = 50  # of Gumbel MuZero


def completed(visits, total, logits, value):
    """Q of each action [..., A]; where an action was not tried, a mix of the node's value [..., 1] and the Q of those that
    were (Danihelka et al. 2022, appendix D)"""
    q = total / visits.clamp(min=1)
    tried = torch.where(visits > 0, logits, ILLEGAL).softmax(-1) * (visits > 0)
    count = visits.sum(-1, keepdim=True)
    return torch.where(visits > 0, q, (value + count * (tried * q).sum(-1, keepdim=True)) / (1 + count))


def sharpened(args: Args, visits, q):
    """what Q [..., A] adds to the logits: more, the more has been tried (sigma in the same paper)"""
    return args.q_temperature * (1 + visits.amax(-1, keepdim=True) / C_VISIT) * q


def next_action(args: Args, scale: float, edges, value):
    """edges [..., 4, A] and value [...] of nodes -> the action to try next, and its child (0: none yet)"""
    visits, total, logits, child = edges.unbind(-2)
    value, count = value[..., None], visits.sum(-1, keepdim=True)
    if args.root == "puct":
        q = torch.where(visits > 0, total / visits.clamp(min=1), value)
        score = q / scale + args.puct * logits.exp() * count.clamp(min=1).sqrt() / (1 + visits)
    else:  # visits in proportion to the improved policy
        improved = (logits + sharpened(args, visits, completed(visits, total, logits, value))).softmax(-1)
        score = improved - visits / (1 + count)
    action = torch.where(logits > ILLEGAL / 2, score, -torch.inf).argmax(-1)
    return action, child.gather(-1, action[..., None])[..., 0].long()


def halving_table(actions: int, simulations: int) -> list[list[int]]:
    """[considered, k]: how often an action has been visited that sequential halving visits in simulation k, if it begins with
    so many actions: all of them equally often, then the better half, and so on"""
    table = []
    for considered in range(actions + 1):
        row, left, visits = [], max(1, considered), [0] * actions
        phases = max(1, math.ceil(math.log2(left)))
        while len(row) < simulations:
            for _ in range(max(1, simulations // (phases * left))):
                row += visits[:left]
                visits = [v + (i < left) for i, v in enumerate(visits)]
            left = max(min(2, left), left // 2)
        table.append(row[:simulations])
    return table


def gumbel_action(args: Args, edges, value, gumbel, wanted):
    """The root's next action: of the actions visited `wanted` [T] times, the best by noise [T, A], logits and Q"""
    visits, total, logits, _ = edges.unbind(-2)
    score = gumbel + logits + sharpened(args, visits, completed(visits, total, logits, value[..., None]))
    score = torch.where(logits > ILLEGAL / 2, score, ILLEGAL)
    return torch.where(visits == wanted[:, None], score, 2 * ILLEGAL).argmax(-1)


def plant(args: Args, scale: float, root: Leaf, ended, num_simulations: int) -> Tree:
    """Trees that are only roots; where `ended` [T] nothing can grow"""
    value, rows, actions = root.value, *root.logits.shape
    nodes = num_simulations + 2
    edges = value.new_zeros(rows, nodes, 4, actions)
    edges[:, :, 2] = ILLEGAL
    edges[:, 0, 2] = root.logits
    about = value.new_zeros(rows, nodes, 3)
    about[:, 0, 0], about[:, 0, 2] = value, ended
    best = torch.zeros(rows, nodes, dtype=torch.int64, device=value.device)
    best[:, 0] = next_action(args, scale, edges[:, 0], value)[0]
    follow = torch.arange(nodes, device=value.device).repeat(rows, 1)

    def room(x):
        grown = x.new_zeros(rows, nodes, *x.shape[1:])
        grown[:, 0] = x
        return grown

    return Tree(edges, about, best, follow, room(root.expected), Position(*(room(x) for x in root.position)))


class Walk(NamedTuple):
    """From the root to where a tree grows: edges d = 0 ... depth - 1, some at the end without use"""

    node: torch.Tensor  # int64 [T, depth] where edge d begins
    action: torch.Tensor  # int64 [T, depth]
    on: torch.Tensor  # bool [T, depth] the edge is part of the walk
    about: torch.Tensor  # [T, depth + 1, 3] `Tree.nodes` of the nodes on the way
    length: torch.Tensor  # int64 [T, 1]
    last: torch.Tensor  # int64 [T, 1] the last edge
    parent: torch.Tensor  # int64 [T] where it begins
    tried: torch.Tensor  # int64 [T] its action
    fresh: torch.Tensor  # bool [T] it has no child yet


def select(tree: Tree, depth: int, allowed) -> Walk:
    """Follows the pointers `depth` times; nowhere where not allowed, bool [T, 1]"""
    rows = torch.arange(len(allowed), device=allowed.device)[:, None]
    steps = [torch.zeros_like(rows)]
    for _ in range(depth):
        steps.append(tree.follow.gather(1, steps[-1]))
    path = torch.cat(steps, 1)  # where the walk is over, its last node again
    node, after = path[:, :-1], path[:, 1:]
    moved = torch.cat([torch.ones_like(allowed), node[:, 1:] != node[:, :-1]], 1)
    about, action = tree.nodes[rows, path], tree.best.gather(1, node)
    on = moved & (about[:, :-1, 2] == 0) & allowed
    length = on.sum(1, keepdim=True)
    last = (length - 1).clamp(min=0)
    parent, tried = node.gather(1, last)[:, 0], action.gather(1, last)[:, 0]
    return Walk(node, action, on, about, length, last, parent, tried, on.any(1) & (after.gather(1, last)[:, 0] == parent))


def returns_of(gamma: float, walk: Walk, reward, value) -> torch.Tensor:
    """[T, depth] the return from each edge on, which ends in the new node (reward and value [T]) or in an old one: an end, or
    the deepest allowed"""
    depth = walk.on.shape[1]
    at_new = (torch.arange(depth, device=value.device) == walk.last) & walk.fresh[:, None]
    paid = torch.where(at_new, reward[:, None], walk.about[:, 1:, 1]) * walk.on
    end_value = torch.where(walk.fresh, value, walk.about[:, 1:, 0].gather(1, walk.last)[:, 0])
    powers = gamma ** torch.arange(depth + 1, dtype=value.dtype, device=value.device)
    ahead = (paid * powers[:-1]).flip(1).cumsum(1).flip(1)
    return (ahead + powers[walk.length] * end_value[:, None]) / powers[:-1]


def reconsider(args: Args, scale: float, tree: Tree, changed, value):
    """What to try next from the nodes `changed` [T, n], which have value [T, n] -> `best` and `follow`"""
    rows = torch.arange(len(changed), device=changed.device)[:, None]
    best, child = next_action(args, scale, tree.edges[rows, changed], value)
    return best, torch.where(child > 0, child, changed)


def search(args: Args, scale: float, root: Leaf, ended, advance, evaluate, uniform, gumbel, table, tick) -> Tree:
    """Grows trees from `root` with one simulation for each entry of `uniform` [simulations, T, K], from which the co-players'
    actions are drawn, once per edge. advance(position, joint) -> position, reward, ended; evaluate(position) -> Leaf. gumbel
    [T, A] and table (see halving_table): the Gumbel root's. tick(name) is called when a phase is over."""
    simulations, rows, one_step = len(uniform), torch.arange(len(ended), device=ended.device), args.planner == "one-step"
    deepest = 1 if one_step else min(simulations, args.max_depth)
    stride = math.ceil(deepest / 4) if args.compile else 1  # four depths: each is compiled anew
    parts = (gumbel_action, select, returns_of, reconsider)
    choose, walk_down, weigh, think_again = (fused(function, args, ended.device) for function in parts)
    tree = plant(args, scale, root, ended, simulations)
    spare, actions, flat = simulations + 1, root.logits.shape[1], tree.edges.flatten(1)
    wanted = table[(root.logits > ILLEGAL / 2).sum(1)]  # [T, simulations]
    for k in range(simulations):
        # Select: each node knows what to try next.
        if one_step:
            tree.best[:, 0], tree.follow[:, 0] = k, 0
        elif args.root == "gumbel":
            action = choose(args, tree.edges[:, 0], tree.nodes[:, 0, 0], gumbel, wanted[:, k])
            child = tree.edges[:, 0, 3].gather(1, action[:, None])[:, 0].long()
            tree.best[:, 0], tree.follow[:, 0] = action, child
        allowed = root.logits[:, k : k + 1] > ILLEGAL / 2 if one_step else torch.ones_like(ended)[:, None]
        walk = walk_down(tree, min(deepest, stride * (k // stride + 1)), allowed)
        tick("select")
        # Expand: the co-players' actions on this edge, the new position, and what the networks say about it.
        others = pick(tree.expected[rows, walk.parent], uniform[k])
        joint = torch.cat([walk.tried[:, None], others], 1)
        position, reward, over = advance(Position(*(x[rows, walk.parent] for x in tree.position)), joint)
        tick("expand")
        leaf = evaluate(position)
        for kept, new in zip((*tree.position, tree.expected), (*leaf.position, leaf.expected), strict=True):
            kept[:, k + 1] = new
        tree.edges[:, k + 1, 2] = leaf.logits
        value = torch.where(over, 0.0, leaf.value)
        tree.nodes[:, k + 1] = torch.stack([value, reward, over.to(value.dtype)], 1)
        tick("network")
        # Back up: returns to the edges of the walk, and what to try next from the nodes that have changed and the new one.
        returns, slot = weigh(args.gamma, walk, reward, value), torch.where(walk.on, walk.node, spare)
        place = slot * 4 * actions + walk.action
        flat.scatter_add_(1, torch.cat([place, place + actions], 1), torch.cat([torch.ones_like(returns), returns], 1))
        place = torch.where(walk.fresh, walk.parent, spare) * 4 * actions + 3 * actions + walk.tried
        flat.scatter_(1, place[:, None], k + 1)
        changed = torch.cat([slot, torch.full_like(rows[:, None], k + 1)], 1)
        best, follow = think_again(args, scale, tree, changed, torch.cat([walk.about[:, :-1, 0], value[:, None]], 1))
        tree.best.scatter_(1, changed, best)
        tree.follow.scatter_(1, changed, follow)
        tick("backup")
    return tree


def verdict(args: Args, tree: Tree, gumbel, num_trees: int):
    """The trees of a decision together -> log of the improved policy [n, A], what is played [n, A], visits [n, A], Q [n, A].
    pUCT plays the improved policy, a softmax of beta * Q (beside the policy's own logits, --search-prior); the Gumbel root
    plays the best action by noise, logits and Q: with one tree among the most visited, with several among all."""
    visits, total, logits, _ = tree.edges[:, 0].unflatten(0, (-1, num_trees)).unbind(-2)  # [n, trees, A]
    q = completed(visits, total, logits, tree.nodes[:, 0, :1].unflatten(0, (-1, num_trees))).mean(1)
    visits, logits = visits.sum(1), logits[:, 0]
    gain = sharpened(args, visits / num_trees, q) if args.root == "gumbel" else args.q_temperature * q
    legal = logits > ILLEGAL / 2
    weight = 1.0 if args.root == "gumbel" else args.search_prior
    improved = torch.where(legal, weight * logits + gain, ILLEGAL).log_softmax(-1)
    improved = torch.where(tree.nodes[::num_trees, 0, 2:] > 0, logits, improved)  # nothing was searched
    if args.root == "puct" or args.planner == "one-step":
        return improved, improved.exp(), visits, q
    score = gumbel[::num_trees] + logits + gain
    if num_trees == 1:  # several trees do not agree on whom they visit most
        most = torch.where(legal, visits, -1)
        score = torch.where(most == most.amax(1, keepdim=True), score, 2 * ILLEGAL)
    return improved, F.one_hot(score.argmax(1), score.shape[1]).to(q.dtype), visits, q


class Known(NamedTuple):
    """What M learners know in E games each when they decide, [M, E, ...]"""

    board: torch.Tensor
    prey: torch.Tensor
    time: torch.Tensor
    first_hunt: torch.Tensor
    last_joint: torch.Tensor
    summary: torch.Tensor
    told: torch.Tensor
    thought: Thought
    seat: torch.Tensor


class Plan(NamedTuple):
    """What a search found, [M, E, ...]"""

    log_probs: torch.Tensor  # [..., 7] log of the improved policy
    played: torch.Tensor  # [..., 7] what is drawn from
    found: torch.Tensor  # [..., 3] gain: what Q promises beyond the policy's own; KL to it; mean length of a walk
    tree: Tree


def plan(args: Args, env: StagHuntEnv, nets: Nets, known: Known, generator, tick=lambda name: None) -> Plan:
    """Searches for all M learners in all E games at once."""
    config, trees, k, payoffs = env.config, args.num_trees, env.config.num_players - 1, list(env.config.payoffs())
    (m, games), device = known.time.shape, env.device
    simulations = NUM_ACTIONS if args.planner == "one-step" else args.num_simulations

    def for_trees(x):  # [M, E, ...] -> [M, n = E * trees, ...]
        return x.repeat_interleave(trees, 1)

    def by_learner(x):  # [M*n, ...] -> [M, n, ...]
        return x.unflatten(0, (m, -1))

    prey, told, goals, seat = (for_trees(x) for x in (known.prey, known.told, known.thought.goals, known.seat))
    drawn = told.flatten(1, 2)
    if args.subgoals != "oracle" and not args.infer_in_tree:
        state = for_trees(known.thought.state.unflatten(1, (games, k))).flatten(1, 2)
        belief = believe(args, nets.models, state, for_trees(known.summary).flatten(1, 2).float())
        drawn = draw_goal(args.goal_kind, belief, goal_noise(args, belief.shape[:2], generator), args.temperature)
    tick("subgoal")

    def evaluate(position: Position) -> Leaf:
        board, clock, last = (by_learner(x) for x in (position.board, position.time / config.final_time, position.last_joint))
        if args.infer_in_tree:
            summary = by_learner(position.summary)
            thought = think(args, env, nets.models, board, prey, clock, summary, told, generator)
            read, legal, expected = thought.goals, thought.legal, thought.expected.exp()
            position = position._replace(state=thought.state.unflatten(1, (-1, k)).flatten(0, 1))
            tick("subgoal")  # and MOA
        else:
            read, (legal, expected) = goals, fused(foresee, args, device)(env, nets.models, board, prey, clock, drawn)
        tick("moa")
        _, logits, value = fused(ActorCritic.act, args, device)(nets.policy, board, clock, last, read, legal)
        return Leaf(*(x.flatten(0, 1) for x in (logits, value, expected)), position)

    def advance(position: Position, joint):
        board = by_learner(position.board)
        if args.search_model == "env":
            after, reward = fused(rules, args, device)(env, position, prey.flatten(0, 1), joint, seat.flatten())
        else:
            members = len(next(nets.world.parameters())) // m
            copies = (x.repeat_interleave(members, 0) for x in (board, by_learner(joint)))
            p = fused(type(nets.world).predict, args, device)(nets.world, *copies, with_raw=False)
            after = p.board.unflatten(0, (m, members))[:, 0].flatten(0, 1)
            reward = p.reward.unflatten(0, (m, members))[:, 0].flatten()
            reward = reward.clamp(min(payoffs), max(payoffs))
        taken = (after[:, -2:] < position.board[:, -2:]).flatten(1).any(1)
        time_now = position.time + 1
        first_hunt = torch.where(taken & (position.first_hunt < 0), time_now, position.first_hunt)
        needed = slice(config.num_players if config.prosocial else 1)
        ended = (time_now >= config.final_time) | (after[:, needed].flatten(1).amax(1) == 0)
        if config.steps_after_first_hunt is not None:
            ended |= (first_hunt >= 0) & (time_now - first_hunt >= config.steps_after_first_hunt)
        summary = position.summary
        if args.infer_in_tree:
            present = board[:, :, 1 : config.num_players].flatten(3).amax(3) > 0
            thought = Thought(None, None, by_learner(position.state).flatten(1, 2), present, None)
            over = torch.zeros_like(by_learner(ended))
            summary = remember(args, env, nets.models, thought, by_learner(joint), by_learner(summary), over).flatten(0, 1)
        return Position(after, time_now, first_hunt, joint, summary, position.state), reward, ended

    nothing = goals[..., :0]
    past = known.summary.float() if args.infer_in_tree else known.summary[..., :0]
    fields = (known.board, known.time.int(), known.first_hunt.int(), known.last_joint, past)
    root = evaluate(Position(*(for_trees(x).flatten(0, 1) for x in fields), nothing.flatten(0, 1)))
    gone = ~for_trees(present_weight(config, known.board)).flatten()
    tick("network")
    uniform = torch.rand(simulations, m * games * trees, k, generator=generator, device=device)
    gumbel = torch.rand(m * games, NUM_ACTIONS, generator=generator, device=device).clamp(1e-6, 1 - 1e-6)
    gumbel = -(-gumbel.log()).log().repeat_interleave(trees, 0)
    scale = max(abs(payoff) for payoff in payoffs) or 1.0
    tree = search(args, scale, root, gone, advance, evaluate, uniform, gumbel, halving(simulations, device), tick)
    log_probs, played, _, q = verdict(args, tree, gumbel, trees)
    own = tree.edges[::trees, 0, 2]
    gain = ((log_probs.exp() - own.exp()) * q).sum(1)
    apart = (log_probs.exp() * (log_probs - own).clamp(-50, 50)).sum(1)
    visited = tree.edges[:, :-1, 0].sum((1, 2)) / tree.edges[:, 0, 0].sum(1).clamp(min=1)  # every node on a path counts one
    found = torch.stack([gain, apart, visited.view(-1, trees).mean(1)], 1)
    tick("backup")
    return Plan(*(x.view(m, games, -1) for x in (log_probs, played, found)), tree)


def foresee(env: StagHuntEnv, models: Models, board, prey, clock, drawn):
    """What co-players with subgoals `drawn` [M, n*K, D] will do on boards [M, n, ...] -> the learner's legal actions bool
    [M, n, 7], probabilities of theirs [M, n, K, 7]"""
    things, walls, legal = all_views(env, board, prey)
    k = legal.shape[2] - 1
    features = models.moa.encoder(things[:, :, 1:].flatten(1, 2), walls[:, :, 1:].flatten(1, 2))
    others = models.moa(features, clock.repeat_interleave(k, 1), drawn, legal[:, :, 1:].flatten(1, 2))
    return legal[:, :, 0], others.exp().unflatten(1, (-1, k))


def rules(env: StagHuntEnv, position: Position, prey, joint, seat):
    """The game's own transition of boards [T, C, H, W], seen from `seat` [T] -> the next boards, the learner's reward"""
    config, n, planes = env.config, env.config.num_players, position.board.flatten(2)
    split = [config.num_stags, config.num_hares]
    to_seats, to_ego = env.unego[seat], env.ego[seat]
    cell, present = planes[:, :n].argmax(2).gather(1, to_seats), (planes[:, :n].amax(2) > 0).gather(1, to_seats)
    stags, hares = (planes[:, n + 1 + i].gather(1, where) for i, where in enumerate(prey.split(split, 1)))
    alive = torch.cat([stags, hares], 1) > 0
    state = State(cell.int(), present, prey.int(), alive, planes[:, n].contiguous(), position.time, position.first_hunt)
    state, reward, _, _ = env.transition(state, joint.gather(1, to_seats))
    players = torch.where(state.present, state.position, config.num_cells).gather(1, to_ego)
    left = env.one_hot[torch.where(state.prey_alive, state.prey_position, config.num_cells)].split(split, 1)
    shared = [state.walls.view(env.word), *(x.sum(1, dtype=env.word) for x in left)]
    board = torch.cat([env.one_hot[players], torch.stack(shared, 1)], 1).view(torch.uint8).view_as(position.board)
    return board, reward.gather(1, seat[:, None])[:, 0]


@functools.cache
def halving(simulations: int, device) -> torch.Tensor:
    return torch.tensor(halving_table(NUM_ACTIONS, simulations), dtype=torch.float32, device=device)


# ---------------------------------------------------------------------------------------------------------------------
# Collecting real steps


class Steps(NamedTuple):
    """T steps of M learners, each field [M, T, E, ...]; this is what the replay keeps"""

    board: torch.Tensor  # uint8 [..., C, H, W]
    prey: torch.Tensor  # uint8 [..., P]
    time: torch.Tensor  # uint8
    first_hunt: torch.Tensor  # int16
    last_joint: torch.Tensor  # uint8 [..., N] what everybody did before this step
    joint: torch.Tensor  # uint8 [..., N] and in it
    reward: torch.Tensor  # [..., N]
    left: torch.Tensor  # bool [..., N] who left the board with the step
    done: torch.Tensor  # bool: the game ended with the step
    next_board: torch.Tensor  # uint8 [..., C, H, W] of the same game, also at its end
    summary: torch.Tensor  # [..., K, hidden] before the step
    forgot: torch.Tensor  # bool: and cleared after it
    told: torch.Tensor  # [..., K, D] --subgoals oracle


class Choices(NamedTuple):
    """What the learners thought meanwhile, [M, T, E, ...]"""

    inputs: torch.Tensor  # of the policy
    goals: torch.Tensor
    legal: torch.Tensor
    log_probs: torch.Tensor  # [..., 7] what they played by: the search's improved policy, or their own
    value: torch.Tensor  # [M, T + 1, E]
    found: torch.Tensor  # [..., 3] see Plan
    expected: torch.Tensor  # [..., K, 7] MOA's probabilities of the co-players' actions (without search: every 8th)
    truth: torch.Tensor  # [..., K, 7] their own
    bayes: torch.Tensor  # [..., K, 7] the best guess from their past (learners: their own)


def new_carry(args: Args, env: StagHuntEnv, seating: Seating, generator) -> dict[str, torch.Tensor]:
    """What goes on from step to step; overwritten in place."""
    m = seating.blocks if seating.share else len(seating.seat)
    rows, n = len(seating.seat) * seating.games // m, env.config.num_players
    kinds = seating.kinds.repeat_interleave(seating.games, 0)
    drawn = torch.randint(len(PLAYER_PROBS), kinds.shape, generator=generator, device=env.device)
    kinds = torch.where(kinds == MIXED, drawn, kinds)
    if seating.strangers:  # only then: all other runs keep their random numbers
        stag_first = torch.rand(kinds.shape, generator=generator, device=env.device) < 0.5
        kinds = torch.where(kinds == SWITCHING, torch.where(stag_first, *seat_kinds([NS, NH])), kinds)
    return {
        "kinds": kinds,
        "last_joint": torch.full((m, rows, n), STAY, device=env.device),
        "summary": torch.zeros(m, rows, n - 1, 4 if args.subgoals == "bayes" else args.hidden, device=env.device),
        "belief": torch.zeros(env.num_envs, n, len(PLAYER_PROBS), device=env.device),
        "took": torch.zeros(env.num_envs, n, dtype=torch.int64, device=env.device),  # HUNT_STAG, HUNT_HARE or 0
        "played": torch.zeros(env.num_envs, dtype=torch.int64, device=env.device),  # games that ended
    }


@torch.no_grad()
def rollout(
    args: Args, env, seating, nets, carry, generator, num_steps: int, learners_act=True, games_each=math.inf, marks=None
):
    """-> Steps, Choices and sums over the finished games per block and seat (only the first `games_each` of each place, so
    that short games do not count more often). Without learners_act they only watch. The first step's search notes in `marks`
    when each of its phases was over."""
    searches = args.planner != "none" and learners_act
    own_seat = seating.to_learners(torch.arange(env.config.num_players, device=env.device).expand(env.num_envs, -1))
    lay, each, games, steps, choices, expected = seating.to_learners, seating.each, [], [], [], []
    rule_based, obs = seating.rule_based or not learners_act, env.observe(env.state)
    every = 1 if searches else math.gcd(num_steps, 8)  # without search nobody acts on what MOA expects: it is only measured
    act, recall = (fused(function, args, env.device) for function in (ActorCritic.act, remember))

    def note(name):
        if marks is not None and step == 0 and searches:
            marks.append(mark(name, env.device))

    def others(x):  # [B, N, ...] by seat -> [M, E, K, ...] of the co-players
        return lay(env.seats_to_ego(x))[:, :, 1:]

    for step in range(num_steps + 1):
        state, board, time_now, last = env.state, lay(obs), each(env.state.time), carry["last_joint"].clone()
        clock = time_now / env.config.final_time
        nothing = clock[..., None][..., :0]  # where a module is off
        if nets.models is None:
            prey = summary = told = nothing
            thought = Thought(nothing, nothing, nothing, nothing, lay(env.legal_actions(state)))
        else:
            prey, summary, told = each(state.prey_position).long(), carry["summary"].clone(), nothing
            if args.subgoals == "oracle":
                told = others(identity(args, carry["kinds"]))
            note("start")
            thought = think(args, env, nets.models, board, prey, clock, summary, told, generator, (step + 1) % every == 0)
            note("subgoal")
        inputs, log_probs, value = act(nets.policy, board, clock, last, thought.goals, thought.legal)
        note("network")
        if step == num_steps:
            break
        played, found_out, probs, first_hunt = log_probs.exp(), nothing, nothing, each(state.first_hunt)
        if searches:
            known = Known(board, prey, time_now, first_hunt, last, summary, told, thought, own_seat)
            log_probs, played, found_out, _ = plan(args, env, nets, known, generator, note)
        if rule_based:
            players = [*PLAYER_PROBS.values(), *(STRANGER_PROBS.values() if seating.strangers else ())]
            everyone = torch.stack([player(env, state, ALL_SEATS) for player in players], 2)  # [B, N, kinds, 7]
            table = everyone[:, :, : len(PLAYER_PROBS)]  # a guess knows no strangers
            kind = carry["kinds"].clamp(min=0)[..., None, None].expand(-1, -1, 1, NUM_ACTIONS)
            probs, bayes = everyone.gather(2, kind)[:, :, 0], (carry["belief"].softmax(2)[..., None] * table).sum(2)
        drawn_from = probs
        if learners_act:
            probs, drawn_from = seating.to_seats(log_probs.exp(), probs), seating.to_seats(played, probs)
        actions, truth, guess = sample(drawn_from, generator), nothing, nothing
        ego = lay(env.seats_to_ego(actions))
        if nets.models is not None:
            truth = guess = others(probs)
        if rule_based:
            is_learner = (carry["kinds"] == LEARNER)[..., None]
            guess = others(torch.where(is_learner, probs, bayes))
            seen = table.gather(3, actions[..., None, None].expand(-1, -1, table.shape[2], 1))[..., 0].clamp(min=1e-9).log()
        obs, reward, present, done = env.step(actions)
        ended, over, next_board, forgot = done[:, None], each(done), nothing, nothing
        if nets.world is not None:
            next_board = lay(torch.where(done.view(-1, 1, 1, 1, 1), env.final_observation(), obs))
        left = present & ~torch.where(ended, env.final_state.present, env.state.present)
        took = torch.where(left, actions, carry["took"])
        carry["took"].copy_(torch.where(ended, 0, took))
        if nets.models is not None:
            after = recall(args, env, nets.models, thought, ego, summary, over)
            chance = args.forget if memory(args) else 0.0
            forgot = over & (torch.rand(over.shape, generator=generator, device=env.device) < chance)
            carry["summary"].copy_(torch.where(forgot[..., None, None], 0.0, after))
        carry["last_joint"].copy_(torch.where(over[..., None], STAY, ego))
        if rule_based:
            belief = carry["belief"] + seen * present[..., None]
            carry["belief"].copy_(belief if memory(args) else torch.where(ended[..., None], 0.0, belief))
        if seating.mixed:  # only between two games
            drawn = torch.randint(len(PLAYER_PROBS), left.shape, generator=generator, device=env.device)
            is_mixed = seating.kinds.repeat_interleave(seating.games, 0) == MIXED
            carry["kinds"].copy_(torch.where(is_mixed & ended, drawn, carry["kinds"]))
        if seating.strangers:  # stag in one game, hare in the next
            is_switching = seating.kinds.repeat_interleave(seating.games, 0) == SWITCHING
            carry["kinds"].copy_(torch.where(is_switching & ended, sum(seat_kinds([NS, NH])) - carry["kinds"], carry["kinds"]))
        games.append((reward, left, took, env.final_return.clone(), env.final_length[:, None].expand_as(left).clone(), done))
        steps.append((board, prey.byte(), time_now.byte(), first_hunt.short(), last.byte(), ego.byte()))
        steps[-1] += (over, next_board, summary.half(), forgot, told)
        choices.append((inputs, thought.goals, thought.legal, log_probs, value, found_out, truth, guess))
        if (step + 1) % every == 0:
            expected.append(thought.expected.exp())
    reward, left, took, total, length, done = (torch.stack(x, -1) for x in zip(*games, strict=True))  # [B, N, T], done [B, T]
    number = carry["played"][:, None] + done.cumsum(1)
    carry["played"].copy_(number[:, -1])
    counts = (done & (number <= games_each))[:, None].expand_as(left)
    found = {"games": counts, "return": counts * total, "length": counts * length}
    found |= {"stag": counts & (took == HUNT_STAG), "hare": counts & (took == HUNT_HARE)}
    sums = {key: x.float().unflatten(0, (seating.blocks, -1)).sum((1, 3)) for key, x in found.items()}  # [S, N]
    reward, left = (lay(env.seats_to_ego(x)).movedim(3, 1) for x in (reward, left))  # [M, T, E, N]
    choices, steps = ([torch.stack(x, 1) for x in zip(*many, strict=True)] for many in (choices, steps))
    choices[4] = torch.cat([choices[4], value[:, None]], 1)
    choices.insert(6, torch.stack(expected, 1))
    return Steps(*steps[:6], reward, left, *steps[6:]), Choices(*choices), sums


# ---------------------------------------------------------------------------------------------------------------------
# Training the models on the replay


class Replay(NamedTuple):
    """R rollouts in a ring"""

    steps: Steps  # [R, M, T, E, ...]
    pushed: torch.Tensor  # int64 [] how many came in
    carried: torch.Tensor  # [M, E, K, hidden] what `refresh` remembers after the rollout it last read

    def push(self, steps: Steps) -> None:
        slot = (self.pushed % len(self.steps.done))[None]
        for kept, new in zip(self.steps, steps, strict=True):
            kept.index_copy_(0, slot, new[None])
        self.pushed.add_(1)

    def pick(self, shape: tuple[int, ...], generator) -> tuple[torch.Tensor, ...]:
        """random rollouts that are filled, steps and games"""
        slots, _, steps, games = self.steps.done.shape
        slot, t, game = torch.rand(3, *shape, generator=generator, device=generator.device)
        return (slot * self.pushed.clamp(max=slots)).long(), (t * steps).long(), (game * games).long()


Sources = list[tuple[Replay, float]]  # where the models' samples come from, and in which shares


def shares(sources: Sources, count: int) -> list[tuple[Replay, int]]:
    """How many of `count` come from each; all of them add up to it."""
    edges = [round(count * sum(share for _, share in sources[:k])) for k in range(len(sources))] + [count]
    found = [(replay, edges[k + 1] - edges[k]) for k, (replay, _) in enumerate(sources)]
    return [(replay, number) for replay, number in found if number]


def sample_windows(sources: Sources, count: int, generator) -> Steps:
    """[M, T, count, ...]"""
    parts = []
    for replay, number in shares(sources, count):
        m, steps = replay.steps.done.shape[1:3]
        learner, clock = (torch.arange(x, device=generator.device) for x in (m, steps))
        slot, _, game = replay.pick((m, number), generator)
        index = slot[:, None], learner[:, None, None], clock[:, None], game[:, None]
        parts.append([x[index] for x in replay.steps])
    return Steps(*(torch.cat(x, 2) for x in zip(*parts, strict=True)))


def sample_transitions(sources: Sources, count: int, models: int, generator) -> Steps:
    """[models, count, ...], some models per learner"""
    parts = []
    for replay, number in shares(sources, count):
        learner = torch.arange(replay.steps.done.shape[1], device=generator.device)
        slot, t, game = replay.pick((models, number), generator)
        parts.append([x[slot, learner.repeat_interleave(models // len(learner))[:, None], t, game] for x in replay.steps])
    return Steps(*(torch.cat(x, 1) for x in zip(*parts, strict=True)))


def same_game(w: Steps) -> torch.Tensor:
    """bool [M, t, u, G, 1]: steps t and u of a window belong to one game"""
    game = w.done.int().cumsum(1) - w.done.int()
    return (game[:, :, None] == game[:, None])[..., None]


def hindsight(args: Args, config: StagHuntConfig, policy: ActorCritic, selection: str, w: Steps, goals, prior, present):
    """The subgoal each co-player turned out to pursue: f_psi(s^g). w [M, T, G, ...]; goals [M, T, G, K, D] as inferred; prior
    [M, T, G, K, _], f_psi of each co-player's state; present bool [M, T, G, K] -> parameters like prior"""
    m, steps, games, k = present.shape
    clock, same = torch.arange(steps, device=present.device), same_game(w) & present[:, None]  # [M, t, u, G, K]
    if selection == "final":
        later = torch.where(same & (clock >= clock[:, None])[..., None, None], clock.view(1, -1, 1, 1), -1).amax(2)
        index = torch.where(later < 0, clock.view(1, -1, 1, 1), later)
    else:
        ahead = torch.arange(1, args.subgoal_horizon + 1, device=present.device)
        u = (clock[:, None] + ahead).clamp(max=steps - 1)  # [T, h]
        valid = same[:, clock[:, None], u] & (clock[:, None] + ahead < steps)[..., None, None]  # [M, T, h, G, K]
        candidate = goal_mean(args, prior)[:, u]  # [M, T, h, G, K, D]
        # V(s_t, g): the critic's value if co-player j pursued the candidate and the others what is inferred of them.
        mine = torch.eye(k, dtype=torch.bool, device=present.device)[..., None]  # [j, K, 1]
        tried = torch.where(mine, candidate[:, :, :, :, None], goals[:, :, None, :, None])  # [M, T, h, G, j, K, D]
        seen = (w.board, w.time / config.final_time, w.last_joint, goals.flatten(3))
        x = policy.inputs(*(field.flatten(1, 2) for field in seen))
        x = x[..., : x.shape[2] - tried.shape[-1] * k].view(m, steps, 1, games, 1, -1).expand(*tried.shape[:5], -1)
        tried = tried.to(x.dtype)
        value = policy.value(torch.cat([x, tried.flatten(5)], 5).flatten(1, 4)).view(valid.shape)
        worst = math.inf if selection == "conservative" else -math.inf
        value = torch.where(valid, value, worst)
        best = value.argmin(2) if selection == "conservative" else value.argmax(2)
        now = clock.view(1, -1, 1, 1)
        index = torch.where(valid.any(2), (now + 1 + best).clamp(max=steps - 1), now)
    return prior.gather(1, index[..., None].expand_as(prior))


def look_back(args: Args, env, models: Models, w: Steps, summary):
    """Runs q_phi along windows w [M, T, G, ...] from `summary` [M, G, K, hidden] on. -> the co-players' views, walls, legal
    actions and features [M, n, _], the summaries before each step [M, T, G, K, hidden] and after the last"""
    things, walls, legal = views_of_others(env, w.board, w.prey)
    state = models.inference.encoder(things, walls)
    event = models.inference.evidence(state, w.joint.long()[..., env.ego[1:]].flatten(1, 3))
    event = event.view(*w.done.shape, *summary.shape[2:])
    present = (things[..., 0] < env.config.num_cells).view(event.shape[:-1])[..., None]
    left = torch.where(w.done, memory(args), 1.0).masked_fill(w.forgot, 0.0)[..., None, None]  # after the step's end
    keep = torch.where(present, models.inference.decay.sigmoid()[:, :, None, None], 1.0) * left
    add, summaries = torch.where(present, event, 0.0) * left, []
    for add_now, keep_now in zip(add.unbind(1), keep.unbind(1), strict=True):
        summaries.append(summary)
        summary = torch.addcmul(add_now, keep_now, summary)
    return things, walls, legal, state, torch.stack(summaries, 1), summary


@torch.no_grad()
def refresh(args: Args, env, models: Models, replay: Replay) -> None:
    """q_phi learns, so what it wrote down about the rehearsed games grows old: one of their rollouts is summed up anew. They
    follow each other in time; before the first, what is remembered of the same players from the last."""
    slot = (replay.pushed % len(replay.steps.done))[None]
    w = Steps(*(x.index_select(0, slot)[0] for x in replay.steps))
    *_, summaries, last = look_back(args, env, models, w, replay.carried * torch.where(slot == 0, memory(args), 1.0))
    replay.steps.summary.index_copy_(0, slot, summaries.half()[None])
    replay.carried.copy_(last)
    replay.pushed.add_(1)


def subgoal_losses(args: Args, env, nets: Nets, w: Steps, eps, generator, pretraining: bool) -> dict[str, torch.Tensor]:
    """w: windows of T steps of G games, [M, T, G, ...] -> losses [M], means over the co-players' steps that count."""
    models, config = nets.models, env.config
    if args.subgoals == "bayes":
        return labelled_loss(args, env, models, w)
    things, walls, legal, state, summary, _ = look_back(args, env, models, w, w.summary[:, 0].float())
    shape, summary = summary.shape[:-1], summary.flatten(1, 3)  # [M, T, G, K]; flattened: n = T*G*K samples
    clock = (w.time / config.final_time).flatten(1).repeat_interleave(shape[3], 1)
    present = (things[..., 0] < config.num_cells).view(shape)
    posterior = models.inference(state, summary)
    with torch.set_grad_enabled(pretraining):
        prior = models.prior(things, walls)
    selection = args.subgoal_selection if args.subgoals in ("inferred", "hindsight") and not pretraining else "final"
    with torch.no_grad():
        goals = goal_mean(args, posterior).reshape(*shape, -1)
        chosen = hindsight(args, config, nets.policy, selection, w, goals, prior.view(*shape, -1), present).flatten(1, 3)
    noise = [goal_noise(args, things.shape[:2], generator) for _ in range(1 + pretraining)]
    goal = draw_goal(args.goal_kind, posterior, noise[0], args.temperature)
    told = w.told.flatten(1, 3) if args.subgoals == "oracle" else None
    given = torch.rand(things.shape[:2], generator=generator, device=env.device)[..., None] < eps
    read = torch.where(given, goal_mean(args, chosen), goal) if told is None else told
    # Each co-player's game weighs the same, else those that wander about until the end drown those that go for their prey.
    weight, same = torch.ones_like(present) if args.moa_data == "all" else present, same_game(w)
    if args.moa_data == "rewarded":
        weight = weight & (same & w.left[:, None, ..., 1:]).any(2)
    weight = (weight / (same & weight[:, None]).sum(2).clamp(min=1)).flatten(1)
    action, truth = w.joint[..., 1:].flatten(1).long(), planes_of(config, things, walls)

    def mean(x):
        return (x * weight).sum(1) / weight.sum(1).clamp(min=1e-6)

    def surprise(moa, read):
        return -mean(moa(moa.encoder(things, walls), clock, read, legal).gather(2, action[..., None])[..., 0])

    def reconstruction(guess):
        return mean(F.binary_cross_entropy_with_logits(guess, truth, reduction="none").mean(2))

    parts = {"moa": surprise(models.moa, read), "recon": reconstruction(models.inference.reconstruct(goal, summary))}
    parts["kl"] = mean(divergence(args.goal_kind, posterior, chosen.detach()))
    parts["total"] = parts["moa"] + parts["recon"] + args.kl_coef * parts["kl"]
    if pretraining:
        goal = draw_goal(args.goal_kind, prior, noise[1], args.temperature)
        own = reconstruction(models.prior.reconstruct(goal)) + args.kl_coef * mean(divergence(args.goal_kind, prior))
        parts["total"] = parts["total"] + own + surprise(models.moa_state, goal)
    return parts


def labelled_loss(args: Args, env, models: Models, w: Steps) -> dict[str, torch.Tensor]:
    """MOA given the goal that the co-player turned out to pursue, stag or hare, where the window shows it"""
    things, walls, legal = views_of_others(env, w.board, w.prey)
    taken, clock = prey_taken(w), (w.time / env.config.final_time)[..., None].expand_as(w.left[..., 1:]).flatten(1)
    weight = ((things[..., 0] < env.config.num_cells) & (taken.flatten(1) > 0)).view(taken.shape)
    weight = (weight / (same_game(w) & weight[:, None]).sum(2).clamp(min=1)).flatten(1)  # each co-player's game alike
    goal = F.one_hot((taken.flatten(1) - 1).clamp(min=0), args.num_goals).float()
    log_probs = models.moa(models.moa.encoder(things, walls), clock, goal, legal)
    own = log_probs.gather(2, w.joint[..., 1:].flatten(1).long()[..., None])[..., 0]
    loss = -(own * weight).sum(1) / weight.sum(1).clamp(min=1e-6)
    return {"moa": loss, "total": loss}


def planes_of(config: StagHuntConfig, things, walls) -> torch.Tensor:
    """[M, n, N + P], [M, n, _] -> float [M, n, C * H*W]: the boards to reconstruct"""
    n, stags = config.num_players, config.num_stags
    one_hot = torch.eye(config.num_cells + 1, config.num_cells, device=things.device)[things]
    walls = walls if config.max_wall_pieces else torch.zeros_like(one_hot[..., 0, :])
    shared = torch.stack([walls, one_hot[..., n : n + stags, :].sum(-2), one_hot[..., n + stags :, :].sum(-2)], -2)
    return torch.cat([one_hot[..., :n, :], shared], -2).flatten(-2)


def train_subgoals(args: Args, env, nets, optimiser, sources: Sources, eps, generator, updates: int, pretraining=False):
    """-> mean losses [M]"""
    total = {}
    for _ in range(updates):
        w = sample_windows(sources, args.model_games, generator)
        parts = subgoal_losses(args, env, nets, w, eps, generator, pretraining)
        # On a GPU the gradient of a lookup table otherwise adds up in any order, and no run is like another. Only here: it
        # also sorts each write by index, which costs time and changes nothing where no two writes meet. (Set so because
        # torch.use_deterministic_algorithms loads torch's compiler.)
        torch.set_deterministic_debug_mode("warn")
        parts["grad_norm"] = optimiser.descend(parts["total"].sum(), 1.0)
        torch.set_deterministic_debug_mode("default")
        total = {key: total.get(key, 0.0) + value.detach() / updates for key, value in parts.items()}
    return total


def train_world_model(args: Args, nets, optimiser, sources: Sources, generator, updates: int) -> dict[str, torch.Tensor]:
    total, models = {}, len(next(nets.world.parameters()))
    for _ in range(updates):
        w = sample_transitions(sources, args.wm_batch_size, models, generator)
        weight = present_weight(nets.world.config, w.board).float()
        loss = nets.world.loss(w.board, w.joint, w.next_board, w.reward[..., 0], weight)
        parts = {"world_model": loss.detach(), "world_model_grad_norm": optimiser.descend(loss.sum(), 1.0)}
        total = {key: total.get(key, 0.0) + value / updates for key, value in parts.items()}
    return total


# ---------------------------------------------------------------------------------------------------------------------
# Imagination


@torch.no_grad()
def trusted_horizon(args: Args, config, world, w: Steps, horizon: int, pooled=False) -> tuple[torch.Tensor, dict]:
    """Plays fresh games (w [M, T, E, ...], not yet trained on) again inside the world model, from their first step on, with
    the actions that were played. -> for how many steps boards and payoffs are right [M] (pooled: of all learners together,
    who have one game each), and figures [M]. Of many games at most 1024 are played."""
    w = Steps(*(x[:, :horizon, :: math.ceil(x.shape[2] / 1024)] for x in w))
    members, board, trusted, figures = len(next(world.parameters())) // len(w.done), w.board[:, 0], [], {}
    valid = right = paid = torch.ones_like(w.done[:, 0])
    predict = fused(type(world).predict, args, w.done.device)

    def nearest(reward):
        return torch.stack([(reward - payoff).abs() for payoff in config.payoffs()], -1).argmin(-1)

    for k in range(w.done.shape[1]):
        valid = valid & present_weight(config, w.board[:, k])
        now = (y.repeat_interleave(members, 0) for y in (board, w.joint[:, k]))
        p = predict(world, *now, with_raw=k == 0)
        boards, reward = p.board.unflatten(0, (-1, members)), p.reward.unflatten(0, (-1, members))[:, 0]
        right = right & (boards[:, 0] == w.next_board[:, k]).flatten(2).all(2)
        paid = paid & (nearest(reward) == nearest(w.reward[:, k, :, 0]))
        count = valid.sum(1).clamp(min=1)
        figures[f"exact_match/{k + 1}"] = (right & valid).sum(1) / count
        good, seen = ((x & valid).sum(1) for x in (right & paid, valid))
        if pooled:
            good, seen = good.sum().expand_as(good), seen.sum().expand_as(seen)
        trusted.append(good >= args.trust_exact_match * seen)  # without a game, nothing speaks against it
        if k == 0:
            error = (p.raw.unflatten(0, (-1, members))[:, 0] - w.next_board[:, 0].float()).square().mean((3, 4))  # [M, E, C]
            channel = (error * valid[..., None]).sum(1) / count[:, None]
            squared = (reward - w.reward[:, 0, :, 0]).square()
            figures |= {"obs_mse": channel.mean(1), "reward_mse": (squared * valid).sum(1) / count}
            figures |= {f"per_channel_mse/{c}": channel[:, c] for c in range(channel.shape[1])}
            differ = (boards != boards[:, :1]).flatten(3).any(3).any(1)
            figures["disagreement"] = (differ & valid).sum(1) / count
        board, valid = boards[:, 0], valid & ~w.done[:, k]
    return torch.stack(trusted, 1).int().cumprod(1).sum(1), figures


def present_weight(config: StagHuntConfig, board) -> torch.Tensor:
    """[..., C, H, W] -> bool [...]: does the step count? The learner is on the board (prosocial: or left it)."""
    present = board[..., 0, :, :].flatten(-2).amax(-1) > 0
    return torch.ones_like(present) if config.prosocial else present


@torch.no_grad()
def imagine(args: Args, env, nets: Nets, start: Steps, alive, horizon: int, trusted, generator) -> dict[str, torch.Tensor]:
    """From real states `start` [M, n, ...] on, where alive: infer subgoals, act, let MOA act for the others, ask the world
    model for the next board. -> samples [M, h, n, ...] with `alive`: the rollout had not ended nor been cut before the step"""
    config, found = env.config, []
    board, time_now, first_hunt, last = start.board, start.time.int(), start.first_hunt.int(), start.last_joint.long()
    prey, summary, members = start.prey.long(), start.summary.float(), len(next(nets.world.parameters())) // len(start.done)
    low, high, parts = min(config.payoffs()), max(config.payoffs()), (ActorCritic.act, remember, type(nets.world).predict)
    act, recall, predict = (fused(function, args, env.device) for function in parts)
    for step in range(horizon + 1):
        clock = time_now / config.final_time
        expect = step < horizon  # nobody acts after the last step
        thought = think(args, env, nets.models, board, prey, clock, summary, start.told, generator, expect)
        inputs, log_probs, value = act(nets.policy, board, clock, last, thought.goals, thought.legal)
        if step == horizon:
            break
        alive = alive & (step < trusted)[:, None]
        own, others = sample(log_probs.exp(), generator), sample(thought.expected.exp(), generator)
        joint = torch.cat([own[..., None], others], 2)
        p = predict(nets.world, board.repeat_interleave(members, 0), joint.repeat_interleave(members, 0), with_raw=False)
        boards, reward = p.board.unflatten(0, (-1, members)), p.reward.unflatten(0, (-1, members))[:, 0]
        if members > 1:
            alive = alive & ~(boards != boards[:, :1]).flatten(3).any(3).any(1)
        if args.imagined_reward_clip:
            reward = reward.clamp(low, high)
        after = boards[:, 0]
        taken = (after[:, :, -2:] < board[:, :, -2:]).flatten(2).any(2)
        time_now = time_now + 1
        first_hunt = torch.where(taken & (first_hunt < 0), time_now, first_hunt)
        needed = slice(config.num_players if config.prosocial else 1)  # who has left earns nothing more, unless all share
        ended = (time_now >= config.final_time) | (after[:, :, needed].flatten(2).amax(2) == 0)
        if config.steps_after_first_hunt is not None:
            ended |= (first_hunt >= 0) & (time_now - first_hunt >= config.steps_after_first_hunt)
        sampled = {"inputs": inputs, "legal": thought.legal, "action": own, "value": value, "reward": reward}
        sampled |= {"log_prob": log_probs.gather(2, own[..., None])[..., 0], "ended": ended, "alive": alive}
        found.append(sampled)
        summary = recall(args, env, nets.models, thought, joint, summary, torch.zeros_like(ended))
        board, last, alive = after, joint, alive & ~ended
    result = {key: torch.stack([x[key] for x in found], 1) for key in found[0]}
    return result | {"value": torch.cat([result["value"], value[:, None]], 1)}


# ---------------------------------------------------------------------------------------------------------------------
# PPO


def advantages(args: Args, reward, value, ended, alive) -> torch.Tensor:
    """reward, ended, alive [M, T, E], value [M, T + 1, E] -> [M, T, E]. No value is taken from beyond an end; where a rollout
    is cut (alive goes out without an end), the value of the state there stands for the rest."""
    lam, out, ahead = args.gae_lambda if args.returns == "gae" else 1.0, [], 0.0
    for t in reversed(range(reward.shape[1])):
        go_on = (~ended[:, t]).float()
        delta = reward[:, t] + args.gamma * go_on * value[:, t + 1] - value[:, t]
        ahead = delta + args.gamma * lam * go_on * ahead
        ahead = torch.where(alive[:, t], ahead, 0.0)  # what follows a cut is not known
        out.append(ahead)
    return torch.stack(out[::-1], 1)


def batch_of(args: Args, x: dict[str, torch.Tensor], real: bool) -> dict[str, torch.Tensor]:
    """[M, T, E, ...] -> [M, T*E, ...] with advantages, targets and weights"""
    advantage = advantages(args, x["reward"], x["value"], x["ended"], x["alive"])
    kept = {key: x[key] for key in ("inputs", "legal", "action", "log_prob", "reward")} | {"value": x["value"][:, :-1]}
    kept |= {"advantage": advantage, "target": advantage + kept["value"]}
    kept["weight"] = x["alive"].float() * (1.0 if real else args.imagined_weight)
    kept["critic_weight"] = kept["weight"] * float(real or args.critic_data == "mixed")
    kept["real"] = torch.full_like(kept["weight"], float(real))
    kept["distilled"] = kept["weight"] * float(real and args.planner != "none" and args.policy_loss == "distill")
    kept["search_probs"] = x.get("search_probs", torch.zeros_like(x["legal"], dtype=torch.float32))
    return {key: value.flatten(1, 2) for key, value in kept.items()}


NUMBERS = ("action", "log_prob", "advantage", "target", "weight", "critic_weight", "real", "distilled")


def improve(args: Args, policy: ActorCritic, optimiser, batch: dict[str, torch.Tensor], generator) -> dict[str, torch.Tensor]:
    """Distillation of what was searched and PPO on the other samples [M, n, ...], which all learners read in the same random
    order; -> mean of every figure [M] over all minibatches"""
    totals, loss_of = 0.0, fused(ppo_loss, args, generator.device)
    numbers = torch.stack([batch[key].float() for key in NUMBERS], 2)
    samples = batch["inputs"], batch["legal"], numbers, batch["search_probs"]
    samples = living(samples, batch["weight"] > 0, args.num_minibatches)
    m, n = samples[0].shape[:2]
    first, samples = n * torch.arange(m, device=generator.device)[:, None], [x.flatten(0, 1) for x in samples]
    for _ in range(args.update_epochs):
        order = torch.rand(n, generator=generator, device=generator.device).argsort()
        for part in order.tensor_split(args.num_minibatches):
            index = (first + part).flatten()  # whole rows by one index: GPUs copy those fastest
            loss, parts = loss_of(args, policy, *(x.index_select(0, index).unflatten(0, (m, -1)) for x in samples))
            parts["grad_norm"] = optimiser.descend(loss, args.max_grad_norm)
            totals = totals + torch.stack(list(parts.values()))
    return dict(zip(parts, totals / (args.update_epochs * args.num_minibatches), strict=True))


def ppo_loss(
    args: Args, policy: ActorCritic, inputs, legal, numbers, search_probs
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-> the sum of all learners' losses, and its parts [M]"""
    mb, (log_probs, value) = dict(zip(NUMBERS, numbers.unbind(2), strict=True)), policy(inputs, legal)
    log_ratio = (log_probs * policy.one_hot[mb["action"].long()]).sum(2) - mb["log_prob"]

    def share(weight):
        return weight / weight.sum(1, keepdim=True).clamp(min=1)

    by_ppo = mb["weight"] * (mb["distilled"] == 0)
    log_ratio = torch.where(by_ppo > 0, log_ratio, 0.0)
    own, by_ppo = share(mb["weight"]), share(by_ppo)

    def mean(x, weight=None):
        return (x * (own if weight is None else weight)).sum(1)

    advantage = mb["advantage"] - mean(mb["advantage"], by_ppo)[:, None]
    advantage = advantage / (mean(advantage.square(), by_ppo).sqrt()[:, None] + 1e-8)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    clipped_loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    surprise = -(search_probs * log_probs.clamp(min=-50)).sum(2)
    error = 0.5 * (value - mb["target"]).square()
    parts = {
        "policy": mean(torch.where(mb["distilled"] > 0, surprise, clipped_loss)),
        "distill": mean(surprise, share(mb["distilled"])),
        "value": mean(error, share(mb["critic_weight"])),
        "entropy": mean(-(log_probs.exp() * log_probs).sum(2)),
    }
    loss = parts["policy"] + args.vf_coef * parts["value"] - args.ent_coef * parts["entropy"]
    with torch.no_grad():
        far = ((ratio - 1).abs() > args.clip_coef).float()
        parts |= {"approx_kl": mean(ratio - 1 - log_ratio, by_ppo), "clipfrac": mean(far, by_ppo)}
        for name, part in (("real", mb["real"]), ("imagined", 1 - mb["real"])):
            parts[f"value_{name}"] = mean(error, share(mb["weight"] * part))
    return loss.sum(), {key: x.detach() for key, x in parts.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Figures, all on the device: dictionaries of tensors [M, ...]


def moa_figures(w: Steps, c: Choices) -> dict[str, torch.Tensor]:
    """How well MOA foretold the co-players' actions in fresh games, beside the best that can be known: their own
    probabilities, and for rule-based players what follows from their past. Only steps of players on the board count."""
    every = c.truth.shape[1] // c.expected.shape[1]
    board, joint, truth, bayes = (x[:, every - 1 :: every] for x in (w.board, w.joint, c.truth, c.bayes))
    weight = (board[:, :, :, 1 : joint.shape[3]].flatten(4).amax(4) > 0).float()
    action, count = joint[..., 1:].long(), weight.flatten(1).sum(1).clamp(min=1)

    def mean(x):
        return (x * weight).flatten(1).sum(1) / count

    figures = {}
    for name, probs in (("", c.expected), ("ceiling/", truth), ("bayes/", bayes)):
        own = probs.gather(4, action[..., None])
        figures[f"{name}nll"] = mean(-own[..., 0].clamp(min=1e-9).log())
        figures[f"{name}top1"] = mean((probs.argmax(4) == action).float())
    figures["top3"] = mean(((c.expected > c.expected.gather(4, action[..., None])).sum(4) < 3).float())
    confidence, guess = c.expected.max(4)
    place = (confidence * 15).nan_to_num().clamp(0, 14).long()  # as an integer, NaN depends on the machine
    bins = F.one_hot(place, 15) * weight[..., None]
    gap = (bins * (confidence - (guess == action).float())[..., None]).flatten(1, 3).sum(1)
    figures["ece"] = gap.abs().sum(1) / count
    taken = (F.one_hot(action, NUM_ACTIONS) * weight[..., None]).flatten(1, 3)
    figures["confusion"] = taken.transpose(1, 2) @ F.one_hot(guess, NUM_ACTIONS).float().flatten(1, 3)  # [M, true, predicted]
    return figures


def distribution_figures(name: str, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weight = (batch["weight"] > 0).float()
    count, figures = weight.sum(1).clamp(min=1), {f"{name}/samples": weight.sum(1)}
    for key, x in (("reward", batch["reward"]), ("return", batch["target"]), ("value", batch["value"])):
        mean = (x * weight).sum(1) / count
        figures[f"{name}/{key}_mean"] = mean
        figures[f"{name}/{key}_std"] = (((x - mean[:, None]).square() * weight).sum(1) / count).sqrt()
    return figures


# ---------------------------------------------------------------------------------------------------------------------
# One experiment


class Adam:
    """Its state stands in place from the start, where a CUDA graph may keep it. torch.optim has the same as a class, which
    loads torch's compiler first: seconds before the first iteration."""

    def __init__(self, parameters, learning_rate: float, device, eps: float = 1e-8, beta2: float = 0.999):
        self.parameters, self.rate = list(parameters), torch.tensor(learning_rate, device=device)
        self.numbers = {"beta1": 0.9, "beta2": beta2, "eps": eps, "weight_decay": 0.0, "amsgrad": False, "maximize": False}
        self.means, self.squares = ([torch.zeros_like(p) for p in self.parameters] for _ in range(2))
        self.steps = [torch.zeros((), device=device) for _ in self.parameters]

    def tensors(self) -> dict:
        """What a step changes (the rate is set by the loop)"""
        return {name: dict(enumerate(getattr(self, name))) for name in ("means", "squares", "steps")}

    def descend(self, loss, max_norm: float) -> torch.Tensor:
        """One step down the loss; -> the norms of the models' gradients [M], each clipped to max_norm"""
        for p in self.parameters:
            p.grad = None
        loss.backward()
        asked = [k for k, p in enumerate(self.parameters) if p.grad is not None]
        moved, means, squares, steps = ([x[k] for k in asked] for x in (self.parameters, self.means, self.squares, self.steps))
        norms = average_and_clip(moved, max_norm)
        with torch.no_grad():
            adam(moved, [p.grad for p in moved], means, squares, [], steps, fused=True, lr=self.rate, **self.numbers)
        return norms


@dataclasses.dataclass
class Experiment:
    args: Args
    env: StagHuntEnv
    seating: Seating
    nets: Nets
    optimisers: dict[str, Adam]
    carry: dict[str, torch.Tensor]
    replay: Replay | None  # the learners' own last games
    rehearsed: Replay | None  # games of rule-based players, so that the models do not forget them
    generator: torch.Generator
    eps: torch.Tensor  # [] share of hindsight subgoals in MOA's training
    trusted: torch.Tensor  # [M] how many steps may be imagined
    totals: dict = dataclasses.field(default_factory=dict)  # sums of figures since the last log, by kind of iteration
    last: dict = dataclasses.field(default_factory=dict)  # the newest samples, for pictures

    def sources(self) -> Sources:
        if self.rehearsed is None or self.args.rehearsal == 0:
            return [(self.replay, 1.0)]
        return [(self.replay, 1 - self.args.rehearsal), (self.rehearsed, self.args.rehearsal)]

    def tensors(self) -> dict:
        """Everything that changes, but for the sums in `totals`"""
        nets = {name: net.state_dict() for name, net in self.nets._asdict().items() if net is not None}
        replay, rehearsed = ({} if r is None else {**r.steps._asdict(), "pushed": r.pushed, "carried": r.carried}
                             for r in (self.replay, self.rehearsed))  # fmt: skip
        optimisers = {name: optimiser.tensors() for name, optimiser in self.optimisers.items()}
        kept = {"env": self.env.tensors(), "carry": self.carry, "trusted": self.trusted, "eps": self.eps}
        kept |= {"nets": nets, "optimisers": optimisers, "replay": replay, "rehearsed": rehearsed}
        return kept | {"generators": [self.generator.get_state(), self.env.generator.get_state()]}

    def load(self, saved: dict) -> None:
        """Everything in place, where a CUDA graph looks for it"""
        put({**self.tensors(), "generators": []}, {**saved, "generators": []})
        for generator, state in zip((self.generator, self.env.generator), saved["generators"], strict=True):
            generator.set_state(state)


def put(now, saved) -> None:
    """Copies nested dictionaries and lists of tensors into others of the same shapes."""
    if isinstance(now, dict):
        for key in now.keys() | saved.keys():
            put(now[key], saved[key])
    elif isinstance(now, torch.Tensor):
        if now.shape != saved.shape:
            raise ValueError(f"a tensor of the checkpoint is {tuple(saved.shape)}, not {tuple(now.shape)}")
        now.copy_(saved)
    else:
        for pair in zip(now, saved, strict=True):
            put(*pair)


def make_experiment(args: Args, seating: Seating, seeds: list[int], device, rehearsed: int = 0, purpose=0) -> Experiment:
    """Fresh networks for every learner, and room for `rehearsed` rule-based games per learner beside the replay. Each purpose
    (training, pretraining, playing with a checkpoint; three more for each rank) has other games."""
    config, first = args.config.checked(), 2 * (seeds[0] + 1_000_000 * purpose)
    env = StagHuntEnv(config, seating.blocks * seating.games, device, first, compile=args.compile and device.type == "cuda")
    generator = torch.Generator(device).manual_seed(first + 1)
    m = seating.blocks if seating.share else len(seating.seat)
    rows, goal_inputs = len(seating.seat) * seating.games // m, (config.num_players - 1) * goal_size(args)
    own_seeds = [100 * seeds[i * len(seeds) // m] + i % max(1, m // len(seeds)) for i in range(m)]
    generators = [torch.Generator().manual_seed(seed) for seed in own_seeds]
    goal_inputs = 0 if args.subgoals == "none" else goal_inputs
    precision = torch.bfloat16 if args.precision == "bf16" and device.type == "cuda" else torch.float32
    policy = ActorCritic(config, generators, args.policy_hidden, goal_inputs, precision).to(device)
    nets = Nets(policy, None, None)
    if modelled(args):
        nets = nets._replace(models=Models(args, config, own_seeds).to(device))
    if needs_world(args):
        nets = nets._replace(world=make_world_model(args, config, m * args.wm_ensemble, own_seeds, device))
    optimisers = {"policy": Adam(policy.parameters(), args.learning_rate, device, eps=1e-5)}
    if nets.models is not None:
        learned = [*nets.models.inference.parameters(), *nets.models.moa.parameters()]
        optimisers["subgoals"] = Adam(learned, args.subgoal_learning_rate, device)
    if nets.world is not None:
        optimisers["world"] = Adam(nets.world.parameters(), args.wm_learning_rate, device, beta2=0.99)
    carry, stores = new_carry(args, env, seating, generator), [None, None]
    if nets.models is not None:
        steps, _, _ = rollout(args, env, seating, nets, carry, generator, 1, learners_act=False)  # only for the shapes
        env.reset(first)
        generator.manual_seed(first + 1)
        carry = new_carry(args, env, seating, generator)
        for k, games in enumerate((rows, rehearsed)):
            if games:
                shape = (args.replay_rollouts, m, args.num_steps, games)
                number = torch.zeros((), dtype=torch.int64, device=device)
                kept = Steps(*(torch.zeros(*shape, *x.shape[3:], dtype=x.dtype, device=device) for x in steps))
                stores[k] = Replay(kept, number, torch.zeros(m, games, *carry["summary"].shape[2:], device=device))
    trusted = torch.zeros(m, dtype=torch.int64, device=device)
    return Experiment(args, env, seating, nets, optimisers, carry, *stores, generator, torch.zeros((), device=device), trusted)


def needs_world(args: Args) -> bool:
    return args.imagination or (args.planner != "none" and args.search_model == "world-model")


def modelled(args: Args) -> bool:
    return args.subgoals != "none" or args.imagination or args.planner != "none"


def real_batch(x: Experiment, w: Steps, c: Choices) -> dict[str, torch.Tensor]:
    args, config, policy = x.args, x.env.config, x.nets.policy
    alive = present_weight(config, w.board)
    reward, action = w.reward[..., 0], w.joint[..., 0]
    ended = w.done if config.prosocial else w.done | w.left[..., 0]  # who has left earns nothing more
    inputs, value = c.inputs, c.value
    log_prob = c.log_probs.gather(3, action.long()[..., None])[..., 0]
    if args.subgoals == "hindsight":
        with torch.no_grad():
            things, walls, _ = views_of_others(x.env, w.board, w.prey)
            present = (things[..., 0] < config.num_cells).view(*w.done.shape, -1)
            inferred = c.goals.unflatten(3, (present.shape[3], -1))
            prior = x.nets.models.prior(things, walls).view(*present.shape, -1)
            chosen = hindsight(args, config, policy, args.subgoal_selection, w, inferred, prior, present)
            goals = goal_mean(args, chosen).flatten(3)
            flat = (y.flatten(1, 2) for y in (w.board, w.time / config.final_time, w.last_joint, goals))
            inputs = policy.inputs(*flat)
            log_probs, new = policy(inputs, c.legal.flatten(1, 2))
            log_prob = log_probs.view_as(c.log_probs).gather(3, action.long()[..., None])[..., 0]
            inputs, value = inputs.view_as(c.inputs), torch.cat([new.view_as(reward), value[:, -1:]], 1)
    sampled = {"inputs": inputs, "legal": c.legal, "action": action, "log_prob": log_prob, "value": value}
    return batch_of(
        args, sampled | {"reward": reward, "ended": ended, "alive": alive, "search_probs": c.log_probs.exp()}, real=True
    )


def learn_models(x: Experiment, train_world: bool, train_subgoal: bool) -> dict[str, torch.Tensor]:
    """Updates of the world model, and of q_phi and MOA, as far as they are due; -> figures"""
    args = x.args
    if train_subgoal and x.rehearsed is not None and args.subgoals != "bayes":
        refresh(args, x.env, x.nets.models, x.rehearsed)

    def world():
        found = train_world_model(args, x.nets, x.optimisers["world"], x.sources(), x.generator, args.wm_updates)
        return {f"losses/{k}": v.unflatten(0, (-1, args.wm_ensemble)).mean(1) for k, v in found.items()}

    def subgoals():
        learner, updates = x.optimisers["subgoals"], args.subgoal_updates
        found = train_subgoals(args, x.env, x.nets, learner, x.sources(), x.eps, x.generator, updates)
        names = {"moa": "losses/moa", "total": "losses/subgoals", "grad_norm": "losses/subgoals_grad_norm"}
        return {names.get(k, f"omg/{k}"): v for k, v in found.items()}

    first, second = side_by_side(world if train_world else dict, subgoals if train_subgoal else dict, x.env.device)
    return first | second


def iterate(x: Experiment, train_world: bool, train_subgoal: bool) -> tuple[list[list[tuple]], dict]:
    """One iteration; nothing in it waits for the host. Its figures are added to x.totals. -> when each stage was over, and the
    samples, for pictures"""
    args, env, nets, generator = x.args, x.env, x.nets, x.generator
    marks = [mark("start", env.device)]
    phases = []
    w, c, sums = rollout(args, env, x.seating, nets, x.carry, generator, args.num_steps, marks=phases)
    figures = {f"games/{key}": value for key, value in sums.items()}
    marks.append(mark("collect", env.device))
    if args.planner != "none":
        alive = present_weight(env.config, w.board)[..., None]
        found = (c.found * alive).sum((1, 2)) / alive.sum((1, 2)).clamp(min=1)
        figures |= {f"search/{key}": found[:, i] for i, key in enumerate(("gain", "kl", "depth"))}
    if nets.models is not None:
        figures |= {f"moa/{key}": value for key, value in moa_figures(w, c).items()}
        figures["omg/subgoal_norm"] = c.goals.norm(dim=3).mean((1, 2))
    if nets.world is not None:
        horizon, measured = trusted_horizon(args, env.config, nets.world, w, args.imagination_horizon)
        x.trusted.copy_(horizon if args.trust else torch.full_like(horizon, args.imagination_horizon))
        figures |= {f"wm/{key}": value for key, value in measured.items()} | {"wm/horizon": x.trusted.float()}
    if x.replay is not None:
        x.replay.push(w)
    figures |= learn_models(x, train_world, train_subgoal)
    marks.append(mark("models", env.device))
    batch = real_batch(x, w, c)
    figures |= distribution_figures("real", batch)
    last = {"steps": w, "choices": c, "real": batch}
    if args.imagination and args.ppo_real_ratio < 1:
        count = imagined_games(args, w.done.shape[2])
        start = sample_transitions([(x.replay, 1.0)], count, len(w.done), generator)
        alive = present_weight(env.config, start.board)
        *start, alive = living((*start, alive), alive)
        start = Steps(*start)
        dream = imagine(args, env, nets, start, alive, args.imagination_horizon, x.trusted, generator)
        imagined = batch_of(args, dream, real=False)
        figures |= distribution_figures("imagined", imagined)
        last["imagined"] = imagined
        kept = [batch, imagined] if args.ppo_real_ratio > 0 else [imagined]
        batch = {key: torch.cat([part[key] for part in kept], 1) for key in batch}
    marks.append(mark("imagine", env.device))
    found = improve(args, nets.policy, x.optimisers["policy"], batch, generator)
    figures |= {f"losses/{key}": value for key, value in found.items()}
    marks.append(mark("ppo", env.device))
    key = (train_world, train_subgoal)
    total = torch.cat([value.flatten() for value in figures.values()])
    if key not in x.totals:
        shapes = {name: value.shape for name, value in figures.items()}
        x.totals[key] = (shapes, torch.zeros_like(total), torch.zeros_like(total[:1]))
    x.totals[key][1].add_(total)
    x.totals[key][2].add_(1)
    return [phases, marks], last


def living(tensors, alive, least: int = 1):
    """tensors [M, n, ...]; alive bool [M, n]. On a CPU, where shapes may change, without samples that do not count: as many
    as the learner with most of them has (so how many share a minibatch depends on the others)"""
    if alive.is_cuda:
        return tensors
    most = max(least, int(alive.sum(1).max()))
    order = alive.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
    return [x[torch.arange(len(x))[:, None], order] for x in tensors]


def imagined_games(args: Args, games: int) -> int:
    """per learner, so many that --ppo-real-ratio of all samples are real (0: as many as there would be real ones)"""
    share = args.ppo_real_ratio or 0.5
    return max(1, round(args.num_steps * games * (1 - share) / share / args.imagination_horizon))


def mark(name: str, device) -> tuple:
    """A point in time. On a GPU it is an event, which a CUDA graph records at each replay."""
    if device.type == "cpu":
        return name, time.perf_counter()
    event = torch.cuda.Event(enable_timing=True, external=True)
    event.record()
    return name, event


def graphed(function, generators: tuple[torch.Generator, ...], use: bool):
    """On a GPU: the same function, from its second call on as the replay of one CUDA graph. Its result stays in place."""
    if not use or generators[0].device.type == "cpu":
        return function
    calls, graph, result = 0, torch.cuda.CUDAGraph(), None

    def call():
        nonlocal calls, result
        calls += 1
        if calls == 1:  # warm-up, as capturing wants it: on a stream of its own
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                result = function()
            torch.cuda.current_stream().wait_stream(side)
            return result
        if calls == 2:
            for generator in generators:
                graph.register_generator_state(generator)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog may go on meanwhile
                result = function()
        graph.replay()
        return result

    return call


def fused(function, args: Args, device):
    """The same function; on a GPU with --compile in fewer kernels, and its products in --precision bf16"""
    if device.type == "cpu":
        return function
    function = compiled(function) if args.compile else function
    return torch.autocast("cuda", torch.bfloat16, args.precision == "bf16", cache_enabled=False)(function)


@functools.cache
def compiled(function):
    torch._dynamo.config.recompile_limit = 64  # per function; else it would go on uncompiled after 8 shapes
    return torch.compile(function, dynamic=False)


def side_by_side(one, other, device) -> tuple:
    """The results of two functions. On a GPU they may run at the same time: neither reads what the other changes."""
    if device.type == "cpu" or dist.is_initialized():  # ranks average their gradients one after the other
        return one(), other()
    here, beside = torch.cuda.current_stream(device), second_stream(device)
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        first = one()
    second = other()
    here.wait_stream(beside)
    return first, second


@functools.cache
def second_stream(device):
    return torch.cuda.Stream(device)


def repeat_iteration(x: Experiment, graphs: dict, train_world: bool, train_subgoal: bool) -> tuple[float, list[tuple]]:
    """`iterate`, on a GPU as a CUDA graph. What its warm-up changes is put back, so that a run is the same with and without.
    -> the seconds that this took, and the iteration's marks"""
    key, started, generators = (train_world, train_subgoal), time.time(), (x.generator, x.env.generator)
    if key not in graphs:
        graphs[key] = graphed(lambda: iterate(x, *key), generators, x.args.cudagraphs)
        if x.env.device.type == "cuda" and x.args.cudagraphs:
            before = copy.deepcopy(x.tensors())
            for _ in range(2):
                graphs[key]()
            x.load(before)
            for total in x.totals[key][1:]:
                total.zero_()
            torch.cuda.synchronize()
    ready = time.time() - started
    marks, x.last = graphs[key]()
    return ready, marks


def stage_seconds(lists: list[list[tuple]]) -> dict[str, float]:
    """Seconds between marks, added up by name"""
    found = {}
    for marks in lists:
        for (_, a), (name, b) in itertools.pairwise(marks):
            if not isinstance(a, float):
                b.synchronize()
            found[name] = found.get(name, 0.0) + (b - a if isinstance(a, float) else a.elapsed_time(b) / 1000)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Before the first iteration: what the models learn from games of rule-based players


def pretrain(args: Args, seeds: list[int], device) -> tuple[dict, Steps, dict[str, float]]:
    """-> weights of the models and world models of each seed, rule-based games to rehearse [R, M, T, E, ...], figures. The
    learners watch from their seats; with memory the players stay, without they are drawn anew for each game."""
    config, kinds = args.config.checked(), seat_kinds(args.seats.split(","))
    args = dataclasses.replace(args, num_envs=args.pretraining_games, compile=False)  # it would take longer than it saves
    watch = make_seating([kinds] * len(seeds), args.num_envs, True, device)
    mixed = torch.full_like(watch.kinds, MIXED)
    watch = watch._replace(kinds=mixed, rule_based=True, mixed=not memory(args), strangers=False)
    x = make_experiment(args, watch, seeds, device, purpose=1)
    started = {"models": load_models(args, x.nets.models, config, seeds)}
    started |= {"world": load_world_model(args, x.nets.world, config, seeds)}
    optimiser, updates = Adam(x.nets.models.parameters(), 3e-3, device), args.pretraining_updates
    rounds = max(1, min(8, updates // 10))

    def subgoals():
        if not started["models"]:
            train_subgoals(args, x.env, x.nets, optimiser, x.sources(), 0.0, x.generator, 1, pretraining=True)

    def world():
        if x.nets.world is not None and not started["world"]:
            train_world_model(args, x.nets, x.optimisers["world"], x.sources(), x.generator, 1)

    def play():
        return rollout(args, x.env, watch, x.nets, x.carry, x.generator, args.num_steps, learners_act=False)

    study = graphed(lambda: side_by_side(subgoals, world, device), (x.generator,), args.cudagraphs)
    play = graphed(play, (x.generator, x.env.generator), args.cudagraphs)
    for number in tqdm(range(rounds), desc="pretraining", unit="round", leave=False, disable=RANK > 0):
        x.replay.push(play()[0])
        for each in (optimiser, *x.optimisers.values()):  # falls along a cosine
            rate = 3e-3 if each is optimiser else 2e-3
            each.rate.fill_(rate * 0.5 * (1 + math.cos(math.pi * number / rounds)))
        for _ in range(updates // rounds):
            study()
    games = []
    for _ in range(args.replay_rollouts):  # once more, with summaries of the trained q_phi, to rehearse and to measure
        w, c, _ = play()
        games.append(Steps(*(field.clone() for field in w)))
    found = moa_figures(w, c)
    if x.nets.world is not None:
        found |= trusted_horizon(args, config, x.nets.world, w, args.imagination_horizon)[1]
    figures = {key: float(value.mean()) for key, value in found.items() if key != "confusion"}
    weights = {name: net.state_dict() for name, net in x.nets._asdict().items() if net is not None and name != "policy"}

    def by_learner(field):  # [S, T, L*E, ...] each -> [R, M, T, E, ...], or all seats' games in a row if they are shared
        field = torch.stack(field).unflatten(3, (kinds.count(LEARNER), -1))[:, :, :, :, :256]
        return field.flatten(3, 4) if args.share_parameters else field.movedim(3, 2).flatten(1, 2)

    return weights, Steps(*(by_learner(field) for field in zip(*games, strict=True))), figures


def spread(weights: dict[str, torch.Tensor], copies: int, members: int) -> dict[str, torch.Tensor]:
    """one seed's models [S*members, ...] -> one copy for each of its learners [S*copies*members, ...]"""
    return {k: v.unflatten(0, (-1, 1, members)).expand(-1, copies, *[-1] * v.dim()).flatten(0, 2) for k, v in weights.items()}


def load_models(args: Args, models: Models, config: StagHuntConfig, seeds: list[int]) -> bool:
    if args.vae_checkpoint is None:
        return False
    saved = load_file(args.vae_checkpoint, "subgoals-2", "VAE checkpoint")
    size = "goal_dim" if args.goal_kind == "continuous" else "num_goals"
    wanted = {name: getattr(args, name) for name in ("goal_kind", size, "hidden")}
    names = ("height", "width", "num_players", "num_stags", "num_hares", "max_wall_pieces")
    check_same(args.vae_checkpoint, saved["args"], wanted, config, names)
    load_seeds(models, saved["model"], 1, seeds[0] - args.seed)
    return True


def load_world_model(args: Args, world: nn.Module | None, config: StagHuntConfig, seeds: list[int]) -> bool:
    if args.world_model_checkpoint is None or world is None:
        return False
    saved = load_file(args.world_model_checkpoint, "world-model-3", "world-model checkpoint")
    wanted = {name: getattr(args, name) for name in ("wm_head", "wm_hidden", "wm_ensemble")}
    names = ("num_players", "stag_reward", "hare_reward", "time_reward", "strengths", "prosocial")
    names += ("height", "width") if args.wm_head == "pixel" else ()
    check_same(args.world_model_checkpoint, saved["args"], wanted, config, names)
    load_seeds(world, saved["model"], args.wm_ensemble, seeds[0] - args.seed)
    return True


def check_same(path: str, saved: dict, wanted: dict, config: StagHuntConfig, names: tuple[str, ...]) -> None:
    pairs = [(name, saved[name], value) for name, value in wanted.items()]
    pairs += [(name, saved["config"][name], getattr(config, name)) for name in names]
    differs = [f"{name} {there} (asked for: {here})" for name, there, here in pairs if there != here]
    if differs:
        raise ValueError(f"{path} does not fit: {', '.join(differs)}")


def load_seeds(net: nn.Module, saved: dict[str, torch.Tensor], members: int, first: int) -> None:
    """Seed s, counted from `first` on, starts from the checkpoint's seed s (again from the first where there are fewer)."""
    kept = net.state_dict()
    for key, value in saved.items():
        seeds, there = len(kept[key]) // members, len(value) // members
        index = torch.arange(first, first + seeds) % there
        kept[key].copy_(value.unflatten(0, (there, members))[index].flatten(0, 1))


# ---------------------------------------------------------------------------------------------------------------------
# Logs and pictures


def read_totals(x: Experiment) -> dict[str, np.ndarray]:
    """The means since the last call; the only place where figures come to the host."""
    sums, counts = {}, {}
    for shapes, total, count in x.totals.values():
        number = float(count)
        if number == 0:
            continue
        parts = total.cpu().split([math.prod(shape) for shape in shapes.values()])
        for (name, shape), part in zip(shapes.items(), parts, strict=True):
            sums[name] = sums.get(name, 0.0) + part.view(shape).numpy()
            counts[name] = counts.get(name, 0.0) + number
        total.zero_()
        count.zero_()
    return {name: value / counts[name] for name, value in sums.items()}


def log_row(x: Experiment, found: dict[str, np.ndarray], s: int) -> dict[str, float]:
    """Everything that seed s logs. `charts/` are means over the games that ended; the rest are means over the learners."""
    n, blocks = x.env.config.num_players, len(found["games/games"])
    games = {key: found[f"games/{key}"][s] for key in ("games", "return", "stag", "hare", "length")}  # [N]
    count = max(games["games"][0], 1e-9)
    returns = games["return"] / count if games["games"][0] else np.full(n, math.nan)
    stag, hare = games["stag"].sum() / count / n, games["hare"].sum() / count / n
    seats = [i for i, kind in enumerate(x.seating.kinds[0].tolist()) if kind == LEARNER]
    row = {"charts/episodic_return": returns[seats].mean(), "charts/episodic_length": games["length"][0] / count}
    row |= {f"charts/episodic_return/player_{i}": returns[i] for i in range(n)}
    row |= {"charts/stag_share": stag, "charts/hare_share": hare, "charts/nothing_share": max(0.0, 1 - stag - hare)}
    row["audit/return_gap"] = returns[seats].max() - returns[seats].min()
    for name, value in found.items():
        if name.startswith("games/"):
            continue
        own = value.reshape(blocks, -1, *value.shape[1:])[s]  # [learners, ...]
        if name == "moa/confusion":
            table = own.sum(0)
            for a in range(NUM_ACTIONS):
                row[f"moa/recall/{a}"] = table[a, a] / max(table[a].sum(), 1e-9) if table[a].sum() else math.nan
                row[f"moa/precision/{a}"] = table[a, a] / max(table[:, a].sum(), 1e-9) if table[:, a].sum() else math.nan
            continue
        row[name] = own.mean()
        if name in ("real/samples", "imagined/samples", "omg/subgoal_norm", "losses/value_real"):
            row |= {f"audit/{name.replace('/', '_')}/learner_{i}": v for i, v in enumerate(own)}
    return {key: float(value) for key, value in row.items()}


@contextlib.contextmanager
def surviving(what: str):
    """A picture must never cost a run: whatever fails in here is told in one line."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        print(f"could not {what}: {type(error).__name__}: {reason}; the run goes on", flush=True)


def draw_pictures(x: Experiment, found: dict[str, np.ndarray], writers: list[SummaryWriter], step: int) -> None:
    """Confusion matrix, a world-model prediction and the subgoals of each seed; histograms of real and imagined samples"""
    per_seed = len(x.trusted) // len(writers)
    for s, writer in enumerate(writers):
        own = slice(s * per_seed, (s + 1) * per_seed)
        for name in ("real", "imagined"):
            for key, label in (("reward", "reward"), ("target", "return"), ("value", "value")):
                batch = x.last.get(name)
                if batch is not None and (kept := batch[key][own][batch["weight"][own] > 0]).numel():
                    writer.add_histogram(f"{name}/{label}", kept.cpu(), step)
        if x.nets.models is not None:
            confusion = found["moa/confusion"][own].sum(0)
            share = confusion / np.maximum(confusion.sum(1, keepdims=True), 1e-9)
            figure = draw_table(share, ACTION_NAMES, "MOA expects", "the co-player does", vmin=0, vmax=1)
            writer.add_figure("moa/confusion", figure, step)
            draw_subgoals(x, own, writer, step)
        if x.nets.world is not None:
            writer.add_figure("wm/prediction", draw_prediction(x, s * per_seed), step)
        if x.args.planner != "none":
            writer.add_figure("search/tree", draw_tree(x, s), step)


def pyplot():
    """matplotlib without a window; loaded only where something is drawn"""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw_table(values: np.ndarray, names, across: str, down: str, **scale):
    """A matrix, its numbers in the cells"""
    figure, axis = pyplot().subplots(figsize=(1.6 + 0.6 * len(names), 1.2 + 0.6 * len(names)))
    axis.imshow(values, cmap="Blues", alpha=0.5, **scale)  # light, so that the figures can be read
    for (row, column), value in np.ndenumerate(values):
        axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8)
    axis.set(xlabel=across, ylabel=down, yticks=range(len(names)), yticklabels=names)
    axis.set_xticks(range(len(names)), names, rotation=40 * (len(max(names, key=len)) > 3))
    figure.tight_layout()
    return figure


def prey_taken(w: Steps) -> torch.Tensor:
    """int [M, T, E, K]: 1 stag, 2 hare if the co-player takes it in the same game and window, 0 if the game ends without, -1
    where the window ends first"""
    same = same_game(w)
    caught = torch.where(w.left[..., 1:], w.joint[..., 1:].long() - STAY, 0)
    taken = (same * caught[:, None]).amax(2)
    finished = (same[..., 0] & w.done[:, None]).any(2)[..., None]
    return torch.where((taken > 0) | finished, taken, -1)


def draw_subgoals(x: Experiment, own: slice, writer: SummaryWriter, step: int) -> None:
    """The inferred subgoals on their two main axes, coloured by the prey that the co-player took; and how well a linear
    reading of them (fitted to every other game) tells that prey, by step of the game"""
    plt = pyplot()
    w, goals = Steps(*(y[own] for y in x.last["steps"])), x.last["choices"].goals[own]
    if goals.shape[3] == 0:
        return
    taken = prey_taken(w)
    games = torch.arange(w.done.shape[2], device=w.done.device).view(1, 1, -1, 1).expand_as(taken)
    present = w.board[:, :, :, 1 : w.joint.shape[3]].flatten(4).amax(4) > 0
    known = (taken >= 0) & present
    g, label, game = goals.unflatten(3, (taken.shape[3], -1))[known].float().cpu(), taken[known].cpu(), games[known].cpu()
    clock = w.time[..., None].expand_as(taken)[known].cpu()
    inputs, fit = torch.cat([g, torch.ones(len(g), 1)], 1).double(), game % 2 == 0
    if fit.sum() < 20 or (~fit).sum() < 20:
        return
    gram = inputs[fit].T @ inputs[fit] + 1e-3 * torch.eye(inputs.shape[1])
    inverse = torch.linalg.pinv(gram, hermitian=True)  # the oracle's subgoals add up to 1, as the column of ones
    reading = inverse @ (inputs[fit].T @ F.one_hot(label[fit], 3).double())
    right = ((inputs @ reading).argmax(1) == label)[~fit].float()
    writer.add_scalar("omg/probe_accuracy", float(right.mean()), step)
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    _, _, axis_pair = torch.linalg.svd(g - g.mean(0), full_matrices=False)
    place = F.pad((g - g.mean(0)) @ axis_pair[:2].T, (0, 1))[:3000, :2].numpy()  # --goal-dim 1 has one axis
    for number, (name, colour) in enumerate((("nothing", "#9aa5b1"), ("stag", "#6e4623"), ("hare", "#3478c8"))):
        shown = label[:3000].numpy() == number
        axes[0].scatter(*place[shown].T, s=4, alpha=0.4, label=name, color=colour)
    axes[0].legend(fontsize=8)
    axes[0].set(title="subgoals, by the prey the co-player took")
    steps = [(t, right[clock[~fit] == t].mean()) for t in range(x.env.config.final_time) if (clock[~fit] == t).sum() > 5]
    axes[1].plot([t for t, _ in steps], [float(v) for _, v in steps])
    axes[1].set(title="does g tell which prey?", xlabel="step of the game", ylabel="probe accuracy", ylim=(0, 1.02))
    figure.tight_layout()
    writer.add_figure("omg/subgoals", figure, step)


def draw_prediction(x: Experiment, learner: int):
    """Board, true next board and the world model's raw values, of one learner's first game that is on"""
    plt = pyplot()
    w, config, members = x.last["steps"], x.env.config, x.args.wm_ensemble
    t = int((w.board[learner, :, 0, 0].flatten(1).amax(1) > 0).long().argmax())
    board, joint = (y[:, t, :1].repeat_interleave(members, 0) for y in (w.board, w.joint))
    raw = x.nets.world.predict(board, joint).raw[learner * members, 0]
    names = [*(str(k) for k in range(config.num_players)), "W", "S", "h"]
    figure, axes = plt.subplots(1, 3, figsize=(3.2 * config.width * 0.8, config.height * 0.9))
    shown = (("board", w.board[learner, t, 0]), ("true next", w.next_board[learner, t, 0]), ("predicted", raw))
    for axis, (title, planes) in zip(axes, shown, strict=True):
        axis.set(title=title, xlim=(-0.5, config.width - 0.5), ylim=(config.height - 0.5, -0.5))
        axis.set(xticks=np.arange(0.5, config.width - 1), yticks=np.arange(0.5, config.height - 1))
        axis.tick_params(length=0, labelleft=False, labelbottom=False)
        axis.grid(alpha=0.3)
        for (c, y, column), value in np.ndenumerate(planes.float().cpu().numpy()):
            if abs(value) > 0.01:
                text = names[c] if title != "predicted" else f"{names[c]} {value:.2f}"
                axis.text(column, y - 0.4 + 0.8 * c / (len(names) - 1), text, ha="center", va="center", fontsize=6)
    figure.tight_layout()
    return figure


def draw_tree(x: Experiment, s: int):
    """The tree that seed s's first learner on its board grows now, and the board. Leaves the run as it is."""
    plt = pyplot()
    env, lay, state, n = x.env, x.seating.to_learners, x.env.state, x.env.config.num_players
    generator = torch.Generator(env.device)  # the run's own goes on as if nothing had been drawn, even if drawing fails
    generator.set_state(x.generator.get_state())

    def each(value):
        return lay(value[:, None].expand(-1, n, *value.shape[1:]))

    with torch.no_grad():
        board, prey, summary = lay(env.observe(state)), each(state.prey_position).long(), x.carry["summary"]
        told = board.new_zeros(*board.shape[:2], n - 1, 0)
        if x.args.subgoals == "oracle":
            told = lay(env.seats_to_ego(identity(x.args, x.carry["kinds"])))[:, :, 1:]
        thought = think(x.args, env, x.nets.models, board, prey, each(env.clock(state)), summary, told, generator)
        own_seat = lay(torch.arange(n, device=env.device).expand(env.num_envs, -1))
        now = each(state.time), each(state.first_hunt), x.carry["last_joint"]
        known = Known(board, prey, *now, summary, told, thought, own_seat)
        tree = plan(x.args, env, x.nets, known, generator).tree
    m, games = board.shape[:2]
    first = s * (m // x.seating.blocks) * games  # the seed's rows begin here
    on_board = present_weight(env.config, board).flatten()[first : first + games]
    row = first + int(on_board.long().argmax())
    edges, about = (y[row * x.args.num_trees].cpu().numpy() for y in (tree.edges, tree.nodes))
    found = [(int(edges[i, 3, a]), i, a) for i in range(len(edges) - 1) for a in range(NUM_ACTIONS) if edges[i, 3, a]]
    parent = {node: (i, a) for node, i, a in found}
    children = {i: [node for node, above, _ in found if above == i] for i in range(len(edges))}
    place, width = {}, itertools.count()

    def lay_out(node, depth):
        below = [lay_out(child, depth + 1) for child in children[node]]
        place[node] = (sum(below) / len(below) if below else next(width), -depth)
        return place[node][0]

    lay_out(0, 0)
    figure, axes = plt.subplots(1, 2, figsize=(13, 5.5), width_ratios=[1, 3])
    game = row % games if x.seating.share is False else row % x.seating.games
    shown = State(*(y[x.seating.games * s + game : x.seating.games * s + game + 1] for y in state))
    axes[0].imshow(render_rgb(env.config, shown))
    axes[0].set(title=f"seat {int(own_seat.flatten()[row])} decides, step {int(shown.time)}")
    most = edges[0, 0].max()
    for node, (i, a) in parent.items():
        (x0, y0), (x1, y1), visits = place[i], place[node], edges[i, 0, a]
        axes[1].plot([x0, x1], [y0, y1], color="#6e4623", lw=0.5 + 4 * visits / most, alpha=0.6, zorder=1)
        label = f"{ACTION_NAMES[a]}\n{visits:.0f}: {edges[i, 1, a] / visits:.2f}"
        axes[1].text((x0 + 2 * x1) / 3, (y0 + 2 * y1) / 3, label, fontsize=7, ha="center", va="center", zorder=3)
    colours = ["#b0302c" if about[node, 2] else "#3478c8" for node in place]
    axes[1].scatter(*zip(*place.values(), strict=True), s=18, color=colours, zorder=2)
    axes[1].set(title="action, visits: Q; red: the game is over for the learner", yticks=[], xticks=[])
    axes[0].axis("off")
    figure.tight_layout()
    return figure


def film(x: Experiment, path: Path, games: int = 6) -> None:
    """A GIF of the next games in the first place"""
    frames, shown = [], 0
    for _ in range(games * x.env.config.final_time):
        frames.append(render_rgb(x.env.config, x.env.state, x.env.episode_return))
        before = int(x.env.state.time[0])
        rollout(x.args, x.env, x.seating, x.nets, x.carry, x.generator, 1)
        if int(x.env.state.time[0]) <= before:  # a new game
            frames += [render_rgb(x.env.config, x.env.final_state, x.env.final_return)] * 3
            shown += 1
            if shown == games:
                break
    write_gif(str(path), frames)


# ---------------------------------------------------------------------------------------------------------------------
# Several processes. torchrun starts them and tells each its number, the rank. A rank takes whole seeds, or plays a part of
# every seed's games and averages its gradients with the others'. The first one writes.

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
GAMES, SAMPLES = ("env", "carry", "generators"), ("replay", "trusted")  # in a checkpoint: they begin anew on other ranks


def share_of_rank(args: Args) -> Args:
    """The flags of this rank's part: whole seeds if they can be dealt out, else a part of all games and the models' samples"""
    each, rest = divmod(args.num_seeds, WORLD)
    if rest == 0:
        return dataclasses.replace(args, seed=args.seed + RANK * each, num_seeds=each)
    if args.num_envs % WORLD:
        raise ValueError(f"--num-seeds {args.num_seeds} or --num-envs {args.num_envs} must be a multiple of the {WORLD} ranks")
    parts = {name: max(2, math.ceil(getattr(args, name) / WORLD)) for name in ("model_games", "wm_batch_size")}
    parts["num_envs"] = args.num_envs // WORLD
    checked(dataclasses.replace(args, **parts))  # its games must still fill the minibatches
    return dataclasses.replace(args, **parts)


def join_ranks(device: torch.device) -> torch.device:
    """Under torchrun, with one process too: meets the other ranks. -> this rank's device"""
    cuda = device.type == "cuda"
    if "RANK" in os.environ and cuda:
        device = resolve_device(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", device_id=device if cuda else None)
    return device


def of_all_ranks(value) -> list:
    """What each rank has to say, once all have said it"""
    found = [value] * WORLD
    if dist.is_initialized():
        dist.all_gather_object(found, value)
    return found


def figures_of_all(found: dict[str, np.ndarray], by_seed: bool) -> dict[str, np.ndarray]:
    """The seeds of all ranks in a row, or means over the ranks (samples: sums); the same on each, so that all stop together"""
    parts = of_all_ranks(found)
    if by_seed or WORLD == 1:
        return {name: np.concatenate([part[name] for part in parts]) for name in found}
    return {name: sum(part[name] for part in parts) / (1 if name.endswith("/samples") else WORLD) for name in found}


def learn_together(x: Experiment) -> None:
    """All ranks start from the first one's networks and rehearsed games; from here on they average their gradients."""
    shared = [p for net in x.nets if net is not None for p in net.parameters()]
    shared += [] if x.rehearsed is None else [*x.rehearsed.steps, x.rehearsed.pushed, x.rehearsed.carried]
    for tensor in shared:
        tensor.averaged = True
        dist.broadcast(tensor.detach().flatten().view(torch.uint8), 0)  # as bytes: some types cannot be sent


def average_and_clip(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    """`clip_per_model`, of the mean gradient where ranks learn together"""
    if getattr(parameters[0], "averaged", False):
        mean = torch.cat([p.grad.flatten() for p in parameters]) / WORLD
        dist.all_reduce(mean)
        for p, part in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            p.grad.copy_(part.view_as(p))
    return clip_per_model(parameters, max_norm)


def by_learner(change, parts: list, axis: int = 0):
    """Nested dictionaries of one or more ranks -> one, by change(tensors, axis of the learners)"""
    if isinstance(parts[0], dict):
        return {key: by_learner(change, [part[key] for part in parts], int(key in Steps._fields)) for key in parts[0]}
    return change(parts, axis) if isinstance(parts[0], torch.Tensor) and parts[0].dim() else parts[0]


def gathered(x: Experiment, by_seed: bool) -> dict:
    """For a checkpoint, on the first rank: `tensors` as one process would hold them, and `ranks`, what each has for itself"""
    if WORLD == 1:
        return {"tensors": x.tensors()}
    torch.save(x.tensors(), buffer := io.BytesIO())
    parts = [None] * WORLD if RANK == 0 else None
    dist.gather_object(buffer.getvalue(), parts)
    if RANK > 0:
        return {}
    parts = [torch.load(io.BytesIO(part), map_location="cpu", weights_only=True) for part in parts]
    own = [{name: part[name] for name in (GAMES if by_seed else GAMES + SAMPLES)} for part in parts]
    return {"tensors": {**(by_learner(torch.cat, parts) if by_seed else parts[0]), **own[0]}, "ranks": own}


def take_up(x: Experiment, saved: dict, by_seed: bool) -> None:
    """Goes on from a checkpoint: bit for bit on as many ranks as before, else in new games."""
    tensors, own = saved["tensors"], saved.get("ranks", [{}])
    if by_seed:
        tensors = {name: part for name, part in tensors.items() if name not in GAMES}
        tensors = by_learner(lambda parts, axis: parts[0].chunk(WORLD, axis)[RANK].clone(), [tensors])
    if len(own) != WORLD:
        if RANK == 0:
            print(f"{len(own)} rank(s) before, {WORLD} now: learning goes on, in games that begin anew")
        own = [{name: part for name, part in x.tensors().items() if name in GAMES + SAMPLES}] * WORLD
    x.load({**tensors, **own[RANK]})


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def resolved(args: Args) -> Args:
    """Fills in what the method and the device decide."""
    values = {"goal_kind": "continuous", "num_goals": 8, **SEARCH, **BY_DEVICE[resolve_device(args.device).type]}
    values |= METHODS[args.method]
    if values["planner"] != "none":
        values |= SEARCHING[resolve_device(args.device).type]
    if args.method == "ppo" and resolve_device(args.device).type == "cpu":  # its iterations are short
        values |= {"num_envs": 256, "total_steps": 400_000, "update_epochs": 3}
    values["seats"] = ",".join(["learner"] * args.config.num_players)
    return dataclasses.replace(args, **{key: value for key, value in values.items() if getattr(args, key) is None})


def checked(args: Args) -> StagHuntConfig:
    """Refuses wrong flags before anything is written."""
    config = args.config.checked()
    resolve_device(args.device)
    if args.evaluate is None and args.adapt is None and args.cross_play is None:  # these ask the checkpoint
        seats = check_seats(resolved(args).seats.split(","), config.num_players, ("learner", "mixed", *STRANGERS))
        if "learner" not in seats:
            raise ValueError(f"--seats {args.seats}: nobody learns")
    args = resolved(args)
    numbers = "num_seeds total_steps num_envs num_steps log_every save_every policy_hidden hidden update_epochs goal_dim "
    numbers += "num_minibatches subgoal_horizon subgoal_period model_games wm_hidden wm_ensemble wm_period wm_batch_size "
    numbers += "pretraining_games replay_rollouts imagination_horizon eval_games num_simulations num_trees max_depth "
    numbers += "adapt_steps adapt_repetitions adapt_every adapt_rounds adapt_games"
    counts = "picture_every subgoal_updates wm_updates pretraining_updates kl_coef ent_coef vf_coef imagined_weight "
    counts += "puct search_prior"
    rates = "learning_rate subgoal_learning_rate wm_learning_rate max_grad_norm temperature clip_coef q_temperature"
    parts = "gamma gae_lambda ppo_real_ratio hindsight_eps rehearsal trust_exact_match memory_discount forget"
    for names, fits, what in (
        (numbers, lambda x: 1 <= x < math.inf, "a number >= 1"),
        (counts, lambda x: 0 <= x < math.inf, "a number >= 0"),
        (rates, lambda x: 0 < x < math.inf, "a positive number"),
        (parts, lambda x: 0 <= x <= 1, "between 0 and 1"),
        ("num_goals", lambda x: x >= 2, "a number >= 2"),
    ):
        for name in names.split():
            if not fits(getattr(args, name)):
                raise ValueError(f"--{name.replace('_', '-')} must be {what}, not {getattr(args, name)}")
    if args.adapt_steps % args.adapt_every or args.adapt_steps < 4 * args.adapt_every:
        raise ValueError(
            f"--adapt-steps {args.adapt_steps} must be a multiple of --adapt-every {args.adapt_every}, and >= 4 times it"
        )
    if args.imagination and args.ppo_real_ratio == 0 and args.critic_data == "real":
        raise ValueError("--ppo-real-ratio 0 leaves the critic nothing to learn from: --critic-data mixed")
    if args.imagination and args.trust and args.imagination_horizon > args.num_steps:
        raise ValueError(
            f"trust is measured on --num-steps {args.num_steps}, fewer than --imagination-horizon {args.imagination_horizon}"
        )
    if args.inter_episode_belief and not modelled(args):
        raise ValueError("--inter-episode-belief needs subgoals, imagination or search: else there is nothing to remember")
    if args.planner != "none" and args.root == "gumbel" and args.policy_loss == "ppo":
        raise ValueError("--policy-loss ppo needs the probability of what was played, which --root gumbel does not know")
    if args.planner != "none" and args.gamma**args.max_depth < 1e-30:
        raise ValueError(f"--gamma {args.gamma} is too small for --max-depth {args.max_depth}: it divides by its powers")
    if args.planner != "none" and args.subgoals == "hindsight" and args.policy_loss == "ppo":
        raise ValueError("--subgoals hindsight changes what the policy read, --policy-loss ppo must know what the search read")
    if needs_world(args) and args.share_parameters and config.strengths is not None:
        raise ValueError("--strengths with --share-parameters: one world model cannot know whose strength it is to pay for")
    if sum(bool(x) for x in (args.resume, args.evaluate, args.adapt, args.cross_play, args.profile)) > 1:
        raise ValueError("--resume, --evaluate, --adapt, --cross-play and --profile exclude each other")
    if not args.adapt_modes:
        raise ValueError("--adapt-modes names none of frozen, search, learning and both")
    if WORLD > 1 and (args.evaluate or args.adapt or args.cross_play or args.profile):
        raise ValueError(f"--evaluate, --adapt and --profile take one process, not {WORLD}: start them without torchrun")
    if args.num_steps * args.num_envs < args.num_minibatches:
        raise ValueError(
            f"{args.num_minibatches} minibatches are more than a learner's {args.num_steps * args.num_envs} samples"
        )
    if args.config.num_cells > 255 or args.config.final_time > 255:
        raise ValueError("this script takes boards of up to 255 cells and games of up to 255 steps")
    if args.subgoals == "oracle" and goal_size(args) < len(PLAYER_PROBS) + 2:
        raise ValueError(f"--subgoals oracle needs subgoals of size >= {len(PLAYER_PROBS) + 2}, not {goal_size(args)}")
    if args.subgoals == "bayes" and (args.goal_kind, args.num_goals) != ("discrete", 2):
        raise ValueError("--subgoals bayes is a belief in stag or hare: --goal-kind discrete --num-goals 2")
    if args.subgoals == "bayes" and args.vae_checkpoint:
        raise ValueError("--subgoals bayes needs a MOA that knows stag and hare, not the subgoals of a VAE checkpoint")
    if needs_world(args) and config.prosocial and args.wm_head == "structured":
        raise ValueError("--prosocial rewards depend on the whole board, unseen by the structured head: --wm-head pixel")
    planes = config.observation_shape[0]
    if args.wm_channel_weights is not None and args.wm_head != "pixel":
        raise ValueError("--wm-channel-weights belongs to --wm-head pixel")
    if args.wm_channel_weights is not None and len(args.wm_channel_weights) != planes:
        raise ValueError(f"--wm-channel-weights needs {planes} numbers, one per plane, not {len(args.wm_channel_weights)}")
    if args.vae_checkpoint and not modelled(args):
        raise ValueError(f"--vae-checkpoint: --method {args.method} has no subgoals, no imagination and no search")
    if args.world_model_checkpoint and not needs_world(args):
        raise ValueError("--world-model-checkpoint belongs to --imagination or --search-model world-model")
    if Path(args.run_dir).exists() and not Path(args.run_dir).is_dir():
        raise ValueError(f"--run-dir {args.run_dir} is not a folder")
    return config


def args_from(saved: dict, **changes) -> Args:
    return Args(**{**saved, **changes, "config": StagHuntFlags(**saved["config"])})


def main(args: Args) -> dict[str, float]:
    """Returns the last logged figures, averaged over seeds."""
    config = checked(args)
    if args.evaluate:
        return evaluate(args)
    if args.adapt:
        return adapt(args)
    if args.cross_play:
        return cross_play(args, *load_run(args, args.cross_play))
    if args.profile:
        return profile(resolved(args))
    checkpoint = load_file(args.resume, "hopplus-mcts-4", "checkpoint") if args.resume else None
    if checkpoint:
        args = args_from(checkpoint["args"], resume=args.resume, device=args.device)
        config = args.config.checked()
    device, started, args = resolve_device(args.device), time.time(), resolved(args)
    if checkpoint and checkpoint["device"] != device.type:
        raise ValueError(f"{args.resume} is a run on {checkpoint['device']}: it cannot go on bit for bit on {device.type}")
    own, device = share_of_rank(args), join_ranks(device)  # own: the flags of this rank's part
    by_seed, say = own.num_seeds < args.num_seeds, print if RANK == 0 else lambda *_, **__: None
    set_precision(args)
    seeds, done = list(range(args.seed, args.seed + args.num_seeds)), checkpoint["iteration"] if checkpoint else 0
    kinds, own_seeds = seat_kinds(args.seats.split(",")), list(range(own.seed, own.seed + own.num_seeds))
    seating = make_seating([kinds] * own.num_seeds, own.num_envs, args.share_parameters, device)
    games = min(256, args.pretraining_games) * (kinds.count(LEARNER) if args.share_parameters else 1)
    stream = 3 * (1000 * done + (0 if by_seed else RANK))  # other games for each rank, and if they begin anew later
    x = make_experiment(own, seating, own_seeds, device, games if modelled(args) and args.rehearsal else 0, purpose=stream)
    if modelled(args) and not checkpoint:
        if not (args.vae_checkpoint and (args.world_model_checkpoint or not needs_world(args))):
            say(f"pretraining the models on rule-based games, {args.pretraining_updates} updates (--vae-checkpoint and "
                "--world-model-checkpoint take them from elsewhere)", flush=True)  # fmt: skip
        weights, games, learned = pretrain(args, own_seeds, device)
        for name, members in (("models", 1), ("world", args.wm_ensemble)):
            if name in weights:
                getattr(x.nets, name).load_state_dict(spread(weights[name], len(x.trusted) // own.num_seeds, members))
        if x.rehearsed is not None:
            for number in range(args.replay_rollouts):
                x.rehearsed.push(Steps(*(field[number] for field in games)))
            if memory(args):
                x.rehearsed.carried.copy_(games.summary[0, :, 0] / memory(args))
        shown = ", ".join(f"{key} {value:.4g}" for key, value in learned.items() if "channel" not in key)
        say(f"on fresh rule-based games: {shown}", flush=True)
    ready, steps_each = time.time() - started, args.num_envs * args.num_steps
    iterations, spent = math.ceil(args.total_steps / steps_each), 0.0
    if checkpoint:
        take_up(x, checkpoint, by_seed)
        spent, folders = checkpoint["seconds"], [Path(f) for f in checkpoint["folders"]]
        for folder in folders if RANK == 0 else ():
            keep_lines(folder / "metrics.jsonl", "iteration", done)
    else:
        stamp = int(time.time())
        while any(Path(args.run_dir).glob(f"*__{stamp}")):  # another run began in the same second
            stamp += 1
        stamp = of_all_ranks(stamp)[0]
        folders = [Path(args.run_dir) / f"{args.exp_name}__{config.setting}_{args.method}__{s}__{stamp}" for s in seeds]
        for folder in folders if RANK == 0 else ():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "args.json").write_text(json.dumps(dataclasses.asdict(args), indent=2) + "\n")
    if dist.is_initialized() and not by_seed:
        learn_together(x)
    writers = [SummaryWriter(folder, purge_step=done * steps_each + 1) for folder in folders if RANK == 0]
    place = f"{device}" if WORLD == 1 else f"{device} and as many on each of {WORLD - 1} other rank(s)"
    say(f"{config.setting}, {args.method}, {len(x.trusted)} learner(s), {own.num_envs} games per seed, on {place}")
    say(f"ready after {ready:.1f} s; run folder {folders[0]}", flush=True)

    def save(name="checkpoint.pt"):
        kept = {k: v for k, v in dataclasses.asdict(args).items() if k not in ("resume", "evaluate", "adapt")}
        content = {"format": "hopplus-mcts-4", "args": kept, "iteration": done, "device": device.type, **gathered(x, by_seed)}
        if RANK == 0:
            save_atomically(folders[0] / name, content | {"seconds": spent + clock, "folders": [str(f) for f in folders]})
        of_all_ranks(None)  # nobody goes on, or ends, before it is written

    bar = tqdm(initial=done * steps_each, total=iterations * steps_each, unit="step", unit_scale=True, mininterval=1,
               disable=RANK > 0)  # fmt: skip
    graphs, row, clock, began, rows = {}, {}, 0.0, time.time(), []
    while done < iterations:
        progress = done / iterations
        if args.anneal_lr:
            x.optimisers["policy"].rate.fill_(args.learning_rate * (1 - 0.9 * progress))
        x.eps.fill_(args.hindsight_eps * max(0.0, 1 - 2 * progress))
        train_world = x.nets.world is not None and args.wm_updates > 0 and done % args.wm_period == 0
        train_subgoal = x.nets.models is not None and args.subgoal_updates > 0 and done % args.subgoal_period == 0
        capturing, marks = repeat_iteration(x, graphs, train_world, train_subgoal)
        ready, began, done = ready + capturing, began + capturing, done + 1
        if done % args.log_every and done < iterations:
            continue
        found = figures_of_all(read_totals(x), by_seed)
        clock, steps = time.time() - began, done * steps_each
        rows = [log_row(x, found, s) for s in range(args.num_seeds)]
        for s, row in enumerate(rows):
            watched = [key for key in row if key.startswith(("losses/", "omg/", "real/", "imagined/"))]
            bad = next((key for key in watched if not abs(row[key]) < 1e6), None)
            if bad is not None:
                save("checkpoint_bad.pt")
                where = f"iteration {done}, seed {seeds[s]}; see {folders[0]}/checkpoint_bad.pt"
                raise FloatingPointError(f"{bad} is {row[bad]} at {where}")
            row["audit/updates"] = done * args.update_epochs * args.num_minibatches
            row["audit/buffer_steps"] = min(done, args.replay_rollouts) * steps_each if x.replay is not None else steps_each
            if RANK > 0:
                continue
            timing = {f"time/{name}": value for name, value in stage_seconds(marks).items()}
            timing |= {"time/training": spent + clock, "time/ready": ready}
            timing["charts/SPS"] = steps * args.num_seeds / (spent + clock)
            with surviving("write to TensorBoard"):
                for key, value in {**row, **timing}.items():
                    writers[s].add_scalar(key, value, steps)
            with open(folders[s] / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"iteration": done, "steps": steps, **finite({**row, **timing})}) + "\n")
        mean = {key: np.mean([row[key] for row in rows]) for key in ("charts/episodic_return", "charts/stag_share")}
        bar.update(steps - bar.n)
        bar.set_postfix_str(f"return {mean['charts/episodic_return']:.3f}, stag share {mean['charts/stag_share']:.2f}")
        paused = time.time()  # pictures and checkpoints are no training
        if done % args.save_every < args.log_every or done == iterations:
            save()
        if RANK == 0 and ((args.picture_every and done % args.picture_every < args.log_every) or done == iterations):
            with surviving("draw"):
                draw_pictures(x, found, writers[: own.num_seeds], steps)
        began += time.time() - paused
    bar.close()
    if RANK == 0:
        with surviving("film"):
            film(x, folders[0] / "games.gif")
    for writer in writers:
        with surviving("write to TensorBoard"):
            writer.close()
    say(f"{spent + clock:.1f} s of training after {ready:.1f} s of preparation; checkpoint {folders[0]}/checkpoint.pt")
    means = {key: float(np.mean([row[key] for row in rows])) for key in (rows[0] if rows else {})}
    return {"checkpoint": str(folders[0] / "checkpoint.pt"), **means}


def set_precision(args: Args) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # sums in the same order in each run
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.matmul.allow_tf32 = args.precision != "fp32"


def profile(args: Args) -> dict[str, float]:
    """Where the time of a search goes: medians of 20 decisions of all learners in all games, and the ten longest operations"""
    if args.planner == "none":
        raise ValueError("--profile measures a search: --planner mcts")
    device, seeds = resolve_device(args.device), list(range(args.seed, args.seed + args.num_seeds))
    set_precision(args)
    seating = make_seating([seat_kinds(args.seats.split(","))] * args.num_seeds, args.num_envs, args.share_parameters, device)
    x = make_experiment(args, seating, seeds, device)

    def decide():
        marks = []
        rollout(args, x.env, seating, x.nets, x.carry, x.generator, 1, marks=marks)
        return marks

    call = graphed(decide, (x.generator, x.env.generator), args.cudagraphs)
    taken = [stage_seconds([call()]) for _ in range(25)][5:]
    seconds = {name: float(np.median([t[name] for t in taken])) for name in taken[0]}
    trees, total = len(seating.seat) * seating.games * args.num_trees, sum(seconds.values())
    simulations = NUM_ACTIONS if args.planner == "one-step" else args.num_simulations
    rate = trees * simulations / total
    print(f"{trees} trees, {simulations} simulations each, on {device}: {total:.4f} s, {rate / 1e6:.3f} M simulations/s")
    for name, value in seconds.items():
        print(f"{name:<10} {value:.5f} s {value / total:6.1%}")
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (device.type == "cuda")
    with torch.profiler.profile(activities=activities) as kernels:
        decide()
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(kernels.key_averages().table(sort_by=order, row_limit=10, max_name_column_width=60))
    return {**{f"time/{name}": value for name, value in seconds.items()}, "simulations_per_second": rate}


# ---------------------------------------------------------------------------------------------------------------------
# A trained learner among others


def transplant(x: Experiment, saved: dict, index: torch.Tensor) -> None:
    """Gives learner m of x the networks of learner index[m] of a checkpoint."""
    for name, net in x.nets._asdict().items():
        if net is not None:
            members = x.args.wm_ensemble if name == "world" else 1
            tensors = saved["tensors"]["nets"][name]
            net.load_state_dict({k: v.unflatten(0, (-1, members))[index].flatten(0, 1) for k, v in tensors.items()})


def saved_learner(saved: Args, seed: int, seat: int) -> int:
    """The number of the checkpoint's learner that sat there"""
    seats = [i for i, kind in enumerate(seat_kinds(saved.seats.split(","))) if kind == LEARNER]
    if saved.share_parameters:
        return seed
    if seat not in seats:
        raise ValueError(f"seat {seat} was not a learner in this checkpoint (its --seats: {saved.seats})")
    return seed * len(seats) + seats.index(seat)


def load_run(args: Args, path: str) -> tuple[dict, Args]:
    """A checkpoint of this script or of hopplus_ppo.py, and its flags, with those of the search that are given now"""
    try:
        saved = load_file(path, "hopplus-mcts-4", "checkpoint")
    except ValueError:
        saved = load_file(path, "hopplus-5", "checkpoint")
    source, owned = args_from({"planner": "mcts", **saved["args"]}, device=args.device), saved["tensors"]["nets"]
    if "world" not in owned:
        source.search_model = "env"
    given = {name: getattr(args, name) for name in ("planner", *SEARCH) if getattr(args, name) is not None}
    source = resolved(dataclasses.replace(source, **given))
    if source.planner != "none" and "models" not in owned:
        raise ValueError(f"{path} has no model of the others to search with (--method {source.method}): --planner none")
    if source.planner != "none" and source.search_model == "world-model" and "world" not in owned:
        raise ValueError(f"{path} has no world model to search with: --search-model env")
    return saved, source


def evaluate(args: Args) -> dict[str, float]:
    """Frozen learners play in --seats; a table of returns by seat."""
    saved, source = load_run(args, args.evaluate)
    device, games = resolve_device(args.device), min(args.eval_games, 256)
    set_precision(source)
    changes = {"seats": args.seats or source.seats, "num_envs": games, "compile": False, "seed": args.seed}
    changes |= {"replay_rollouts": 1, "forget": 0.0}
    trained = dataclasses.replace(source, **changes)
    config, names = trained.config.checked(), trained.seats.split(",")
    if "learner" not in check_seats(names, config.num_players, ("learner", "mixed", *STRANGERS)):
        raise ValueError(f"--seats {args.seats}: no learner to evaluate")
    seating = make_seating([seat_kinds(names)] * trained.num_seeds, games, trained.share_parameters, device)
    x = make_experiment(trained, seating, list(range(args.seed, args.seed + trained.num_seeds)), device, purpose=2)
    pairs = zip(seating.block.tolist(), seating.seat.tolist(), strict=True)
    index = [saved_learner(source, block, seat) for block, seat in pairs]
    transplant(x, saved, torch.tensor(sorted(set(index)) if trained.share_parameters else index))
    play, each = (trained, x.env, seating, x.nets, x.carry, x.generator, config.final_time), math.ceil(args.eval_games / games)
    found = [rollout(*play, games_each=each)[2] for _ in range(each)]
    sums = {key: sum(part[key] for part in found).cpu().numpy() for key in found[0]}  # [S, N]
    returns, folder = sums["return"] / sums["games"], Path(args.evaluate).parent
    print(f"{config.setting}, {args.evaluate}, frozen; {int(sums['games'][:, 0].sum())} games, {trained.num_seeds} seed(s), "
          f"--planner {trained.planner}")  # fmt: skip
    title = "evaluation" if trained.planner == "none" else "evaluation_search"
    with open(folder / f"{title}.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["seat", "player", "return", "half_width_95", "stag_share", "hare_share"])
        for i, name in enumerate(names):
            mean, half = interval(returns[:, i].tolist())
            shares = [float((sums[key][:, i] / sums["games"][:, i]).mean()) for key in ("stag", "hare")]
            table.writerow([i, name, mean, half, *shares])
            print(f"seat {i} {name:<14} return {mean:.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}")
                  + f"   stag {shares[0]:.2f} hare {shares[1]:.2f}")  # fmt: skip
    film(x, folder / f"{title}.gif")
    return {f"return/player_{i}": float(returns[:, i].mean()) for i in range(len(names))}


def co_player_sets(args: Args, config: StagHuntConfig) -> dict[str, tuple[str, ...]]:
    """name -> the co-players, in ego order from the learner's seat on"""
    names = (args.seats or "").split(",")
    if args.seats is None:
        if config.num_players != 4:
            raise ValueError(f"the sets of --adapt have 3 co-players, this game has {config.num_players - 1}: use --seats")
        return CO_PLAYERS[args.adapt_sets]
    if args.adapt_sets != "standard":
        raise ValueError(f"--seats and --adapt-sets {args.adapt_sets} exclude each other")
    if names.count("learner") != 1 or "mixed" in names:
        raise ValueError(f"--adapt needs one learner and named co-players in --seats, not {args.seats}")
    check_seats(names, config.num_players, ("learner", *STRANGERS))
    at = names.index("learner")
    others = (*names[at + 1 :], *names[:at])
    return {" + ".join(others): others}


def adapt(args: Args) -> dict[str, float]:
    """Trained learners meet the same co-players in game after game: frozen, searching, learning as they play. A table of the
    scores over the last quarter of the steps, beside a random player (0) and a best response (1)."""
    saved, source = load_run(args, args.adapt)
    modes = [name for name in args.adapt_modes if source.planner != "none" or name in ("frozen", "learning")]
    if not modes:
        raise ValueError(f"--adapt-modes {' '.join(args.adapt_modes)} with --planner none: nobody would search")
    args = dataclasses.replace(resolved(dataclasses.replace(args, method="hopplus")), seats=args.seats, adapt_modes=modes)
    config, device, sets = source.config.checked(), resolve_device(args.device), co_player_sets(args, source.config.checked())
    n, rounds, folder = config.num_players, args.adapt_steps // args.adapt_every, Path(args.adapt).parent
    set_precision(source)
    kinds, index, learners = [], [], [i for i, kind in enumerate(seat_kinds(source.seats.split(","))) if kind == LEARNER]
    for players in sets.values():
        for r in range(args.adapt_repetitions):
            order = seat_kinds(["learner", *players])
            kinds.append([order[(i - r) % n] for i in range(n)])  # the learner in seat r mod N
            index.append(saved_learner(source, r // n % source.num_seeds, learners[r % len(learners)]))
    changes = {"num_envs": 1, "num_steps": args.adapt_every, "replay_rollouts": rounds, "share_parameters": False}
    changes |= {"imagination_horizon": config.final_time, "critic_data": "mixed", "model_games": 2}
    changes |= {"forget": 0.0, "compile": False}
    read = "seed learning_rate update_epochs num_minibatches ent_coef subgoal_learning_rate subgoal_updates"
    changes |= {name: getattr(args, name) for name in read.split()} | {"imagination": "world" in saved["tensors"]["nets"]}
    changed = dataclasses.replace(source, **changes)
    seating, index, curves, best = make_seating(kinds, 1, False, device), torch.tensor(index), {}, None
    if args.adapt_references:
        at_random = seating._replace(kinds=torch.where(seating.kinds == LEARNER, *seat_kinds([RANDOM]), seating.kinds))
        x = make_experiment(dataclasses.replace(changed, **METHODS["ppo"]), at_random, [args.seed], device)
        curves["random"], _ = meet(args, x, None, rounds, False, learners_act=False)
        best = [(value, math.nan) for value in best_responses(args, source, sets, device)]
    for name in args.adapt_modes:
        planner = changed.planner if name in ("search", "both") else "none"
        x = make_experiment(dataclasses.replace(changed, planner=planner), seating, [args.seed], device, purpose=2)
        transplant(x, saved, index)
        x.optimisers = {"policy": x.optimisers["policy"]}  # of many learners; `meet` makes the one of MOA
        boards = first_boards(saved, index, device) if x.nets.world is not None else None
        curves[name], figures = meet(args, x, boards, rounds, name in ("learning", "both"))
        for k, key in enumerate(sets if figures else ()):
            own = {f: value.reshape(len(sets), -1)[k].mean() for f, value in figures.items()}
            print(f"{name}, {key}: MOA " + ", ".join(f"{f} {value:.3f}" for f, value in own.items()), flush=True)
    last, shape = slice(-(rounds // 4), None), (len(sets), args.adapt_repetitions)
    scores = {name: (c[last, :, 0].sum(0) / c[last, :, 1].sum(0)).reshape(shape) for name, c in curves.items()}
    table = {name: [interval(row.tolist()) for row in score] for name, score in scores.items()}  # mean and half width
    if best is not None:
        table["best response"] = best
    write_adaptation(folder, list(sets), table, curves, shape, args)
    for name in [name for name in args.adapt_modes if name != "frozen" and "frozen" in scores]:
        gains = [interval((a - b).tolist()) for a, b in zip(scores[name], scores["frozen"], strict=True)]
        print(f"{name} minus frozen: " + ", ".join(f"{k} {m:+.3f} ± {h:.3f}" for k, (m, h) in zip(sets, gains, strict=True)))
    return {f"{name}/{key}": row[k][0] for name, row in table.items() for k, key in enumerate(sets)}


def first_boards(saved: dict, index: torch.Tensor, device, count: int = 256) -> Steps:
    """[M, count, ...]: first boards of games that learner index[m] remembers"""
    replay, pools = Steps(*(saved["tensors"]["replay"][name] for name in Steps._fields)), []
    for m in range(replay.time.shape[1]):
        filled = replay.board[:, m, :, :, 0].flatten(3).amax(3) > 0
        found = ((replay.time[:, m] == 0) & filled).nonzero()
        if len(found) == 0:
            raise ValueError("the checkpoint's replay holds no first board of a game to imagine from")
        r, t, e = found[torch.arange(count) * max(1, len(found) // count) % len(found)].unbind(1)
        pools.append([field[r, m, t, e] for field in replay])
    return Steps(*(torch.stack(field)[index].to(device) for field in zip(*pools, strict=True)))


def meet(args: Args, x: Experiment, boards: Steps | None, rounds: int, learn: bool, learners_act=True):
    """-> return and number of games in the learner's seat [rounds, M, 2], and how well MOA knew the others at last. MOA learns
    from what is seen, and is used where it foretold the newest steps better, so far, than the MOA that the learner came
    with (q_phi stays: what is remembered was written by it). A learner with a world model learns from games that it
    imagines with what it remembers of its co-players, and acts with what it has learned where that earns more, in
    imagination, than what it came with, by two standard errors."""
    policy, seat, models = x.nets.policy, x.seating.seat, x.nets.models
    came_with, curve, figures = copies_of(policy), [], {}
    learned = came_with
    told = None if boards is None else torch.zeros_like(boards.told[:, :1])
    if learn and models is not None and x.args.subgoal_updates:
        models.inference.requires_grad_(False)
        optimiser = Adam(models.moa.parameters(), x.args.subgoal_learning_rate, x.env.device)
        moa_before, moa_learned = copies_of(models.moa), copies_of(models.moa)
        evidence = torch.zeros(len(seat), device=seat.device)

    def surprise(weights, w):
        """mean of -log p of the co-players' newest actions [M], with the same noise for all weights"""
        use(models.moa, weights)
        generator = torch.Generator(x.env.device).manual_seed(args.seed)
        with torch.no_grad():
            return subgoal_losses(x.args, x.env, x.nets, w, 0.0, generator, False)["moa"]

    def dream():
        m, pool = boards.time.shape
        pick_one = torch.randint(pool, (m, args.adapt_games), generator=x.generator, device=seat.device)
        start = Steps(*(field[torch.arange(m, device=seat.device)[:, None], pick_one] for field in boards))
        remembered = next_game(x.args, x.carry["summary"]).expand(-1, args.adapt_games, -1, -1)
        alive = torch.ones_like(start.done)
        start = start._replace(summary=remembered, told=told.expand(-1, args.adapt_games, *told.shape[2:]))
        return imagine(x.args, x.env, x.nets, start, alive, x.args.imagination_horizon, x.trusted, x.generator)

    def worth():
        """return of imagined games: mean and variance of the mean [M]"""
        y = dream()
        total = (y["reward"] * y["alive"]).sum(1)
        return total.mean(1), total.var(1) / total.shape[1]

    def play():
        return rollout(x.args, x.env, x.seating, x.nets, x.carry, x.generator, x.args.num_steps, learners_act)

    def study(batch=None):
        batch = batch_of(x.args, dream(), real=False) if batch is None else batch
        improve(x.args, policy, x.optimisers["policy"], batch, x.generator)

    parts = (play, study, worth)
    play, dream_and_study, worth = (graphed(f, (x.generator, x.env.generator), x.args.cudagraphs) for f in parts)
    for _ in tqdm(range(rounds), desc="learning" if learn else "playing", unit="round", leave=False):
        w, c, sums = play()
        rows = torch.arange(len(seat), device=seat.device)
        curve.append(torch.stack([sums["return"][rows, seat], sums["games"][rows, seat]], 1))
        if models is not None:
            figures |= moa_figures(w, c)
        if not learn:
            continue
        if models is not None and x.args.subgoal_updates:
            evidence += surprise(moa_before, w) - surprise(moa_learned, w)
            x.replay.push(w)
            train_subgoals(x.args, x.env, x.nets, optimiser, x.sources(), x.eps, x.generator, x.args.subgoal_updates)
            moa_learned, figures["MOA changed"] = copies_of(models.moa), (evidence > 0).float()
            use(models.moa, chosen(evidence > 0, moa_learned, moa_before))
        use(policy, learned)
        if boards is None:
            study(real_batch(x, w, c))
            learned = copies_of(policy)
            continue
        told.copy_(w.told[:, -1])
        horizon, _ = trusted_horizon(x.args, x.env.config, x.nets.world, w, x.args.imagination_horizon, pooled=True)
        x.trusted.copy_(horizon if x.args.trust else torch.full_like(horizon, x.args.imagination_horizon))
        for _ in range(args.adapt_rounds):
            dream_and_study()
        learned = copies_of(policy)
        new, new_var = (y.clone() for y in worth())
        use(policy, came_with)
        old, old_var = worth()
        better = new - old > 2 * (new_var + old_var).sqrt()
        figures |= {"imagined return": torch.where(better, new, old), "imagined return before": old, "changed": better.float()}
        use(policy, chosen(better, learned, came_with))
    shown = ["nll", "top1", "ceiling/nll", "ceiling/top1", "MOA changed"]
    shown += ["imagined return", "imagined return before", "changed"]
    return torch.stack(curve).cpu().numpy(), {key: figures[key].cpu().numpy() for key in shown if key in figures}


def copies_of(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def chosen(which: torch.Tensor, these: list[torch.Tensor], those: list[torch.Tensor]) -> list[torch.Tensor]:
    """weights of M stacked networks: of `these` where which [M], else of `those`"""
    return [torch.where(which.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(these, those, strict=True)]


@torch.no_grad()
def use(net: nn.Module, weights: list[torch.Tensor]) -> None:
    for p, value in zip(net.parameters(), weights, strict=True):
        p.copy_(value)


def best_responses(args: Args, source: Args, sets: dict, device) -> list[float]:
    """What plain PPO earns that was trained against exactly each set, with --total-steps"""
    kinds = [seat_kinds(["learner", *players]) for players in sets.values()]
    changes = {"num_envs": 512, "num_seeds": 1, "seed": args.seed, "share_parameters": False, "compile": args.compile}
    changes |= {"cudagraphs": args.cudagraphs, "precision": source.precision, **METHODS["ppo"]}
    plain = dataclasses.replace(resolved(Args(config=source.config, device=args.device)), **changes)
    x = make_experiment(plain, make_seating(kinds, plain.num_envs, False, device), [args.seed], device)
    iterations, graphs = math.ceil(args.total_steps / plain.num_envs / plain.num_steps), {}
    longest = math.ceil(source.config.final_time / plain.num_steps) if x.seating.strangers else 1  # who waits never leaves
    for number in tqdm(range(iterations), desc="best responses", unit="iteration", leave=False):
        if number == iterations - max(longest, iterations // 10):
            read_totals(x)
        x.optimisers["policy"].rate.fill_(plain.learning_rate * (1 - 0.9 * number / iterations))
        repeat_iteration(x, graphs, False, False)
    found = read_totals(x)
    return (found["games/return"][:, 0] / found["games/games"][:, 0]).tolist()


def write_adaptation(folder: Path, sets: list[str], table: dict, curves: dict, shape: tuple[int, int], args: Args) -> None:
    plt = pyplot()

    def normalised(name, k):
        if "best response" not in table:
            return math.nan
        low, high = table["random"][k][0], table["best response"][k][0]
        return (table[name][k][0] - low) / (high - low)

    modes = [name for name in table if name not in ("random", "best response")]
    shown = [name for name in ("random", *modes, "best response") if name in table]
    print(f"return of the learner over the last quarter of {args.adapt_steps} steps, {shape[1]} repetitions over the seats")
    width = max(20, *(len(key) + 1 for key in sets))
    print("".ljust(width) + "".join(name.rjust(16) for name in shown) + "".join(f"{name} norm.".rjust(15) for name in modes))
    with open(folder / "adaptation.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["co_players", *(f"{name} {part}" for name in shown for part in ("mean", "half_width_95")),
                         *(f"{name} normalised" for name in modes)])  # fmt: skip
        for k, key in enumerate(sets):
            cells = [table[name][k] for name in shown]
            norms = [normalised(name, k) for name in modes]
            writer.writerow([key, *(value for cell in cells for value in cell), *norms])
            texts = [f"{mean:.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}") for mean, half in cells]
            texts = [text.rjust(16) for text in texts] + [f"{value:15.3f}" for value in norms]
            print(key.ljust(width) + "".join(texts))
    figure, axes = plt.subplots(1, len(sets), figsize=(2.6 * len(sets), 2.8), squeeze=False)
    with open(folder / "adaptation_curve.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["co_players", "learner", "steps", "return"])
        for k, (key, axis) in enumerate(zip(sets, axes[0], strict=True)):
            for name, curve in curves.items():
                own = curve[:, k * shape[1] : (k + 1) * shape[1]].sum(1)  # [rounds, (return, games)]
                steps, mean = (np.arange(len(own)) + 1) * args.adapt_every, own[:, 0] / np.maximum(own[:, 1], 1)
                axis.plot(steps, mean, label=name)
                writer.writerows([key, name, *pair] for pair in zip(steps, mean, strict=True))
            axis.set(title=key, xlabel="steps")
    with surviving("draw"):
        axes[0][0].legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(folder / "adaptation.png", dpi=75)
    plt.close(figure)
    print(f"tables and curves in {folder}")


def cross_play(args: Args, saved: dict, source: Args) -> dict[str, float]:
    """A learner of each seed among the learners of each seed, frozen, in every seat: a matrix of its returns."""
    config, device, folder = source.config.checked(), resolve_device(args.device), Path(args.cross_play).parent
    set_precision(source)
    n, seeds = config.num_players, source.num_seeds
    if seeds < 2:
        raise ValueError(f"--cross-play needs a run of at least 2 seeds, {args.cross_play} has 1: train with --num-seeds")
    if set(source.seats.split(",")) != {"learner"}:
        raise ValueError(f"--cross-play needs learners in all seats, not {source.seats}")
    each = math.ceil(args.eval_games / n / 32)  # in 32 places at once, so that many seeds find room
    games = math.ceil(args.eval_games / n / each)
    changes = {"num_envs": games, "num_steps": 1, "replay_rollouts": 1, "imagination": False, "forget": 0.0, "compile": False}
    trained = dataclasses.replace(source, **changes)
    meetings = list(itertools.product(range(seeds), range(seeds), range(n)))  # whose learner, among whose, in which seat
    index = [saved_learner(source, a if i == own else b, i) for a, b, own in meetings for i in range(n)]
    seating = make_seating([[LEARNER] * n] * len(meetings), games, False, device)
    x = make_experiment(trained, seating, [args.seed], device, purpose=2)
    transplant(x, saved, torch.tensor(index))
    play = (trained, x.env, seating, x.nets, x.carry, x.generator, config.final_time)
    sums = [rollout(*play, games_each=each)[2] for _ in tqdm(range(each), desc="cross-play", unit="game", leave=False)]
    total, count = (sum(found[key] for found in sums) for key in ("return", "games"))  # [meetings, N]
    own_seat = (total / count).view(seeds, seeds, n, n).diagonal(dim1=2, dim2=3)
    matrix, names = own_seat.mean(2).cpu().numpy(), [str(source.seed + s) for s in range(seeds)]
    print(f"{config.setting}, {args.cross_play}, frozen; {games * each * n} games per pair")
    print("return of a learner of one seed (row) among learners of one seed (column)")
    rows = [[name, *row] for name, row in zip(names, matrix.tolist(), strict=True)]
    print("".join(name.rjust(8) for name in ("", *names)))
    for name, *row in rows:
        print(name.rjust(8) + "".join(f"{value:8.3f}" for value in row))
    scores = {"own team": interval(matrix.diagonal().tolist()), "other teams": off_diagonal(matrix)}
    for name, (mean, half) in scores.items():
        print(f"{name} {mean:.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}"))
    with open(folder / "cross_play.csv", "w", newline="") as file:
        csv.writer(file).writerows([["learner of seed", *(f"among seed {name}" for name in names)], *rows])
    with surviving("draw"):
        figure = draw_table(matrix, names, "among learners of seed", "learner of seed")
        figure.savefig(folder / "cross_play.png", dpi=100)
        pyplot().close(figure)
    return {name: mean for name, (mean, _) in scores.items()}


def off_diagonal(matrix: np.ndarray) -> tuple[float, float]:
    """mean of what lies off the diagonal [S, S] and half width of its 95 % interval. All entries of a seed depend on each
    other, hence the jackknife over seeds; it needs three."""
    seeds, off = len(matrix), ~np.eye(len(matrix), dtype=bool)
    if seeds < 3:
        return float(matrix[off].mean()), math.nan
    without = [np.delete(np.delete(matrix, s, 0), s, 1)[off[1:, 1:]].mean() for s in range(seeds)]
    return interval([seeds * matrix[off].mean() - (seeds - 1) * mean for mean in without])


def clip_per_model(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clips the gradient of each of the M stacked models by its own norm; returns the norms [M]."""
    norms = torch.cat([p.grad.flatten(1) for p in parameters], 1).norm(dim=1)
    factor = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    for p in parameters:
        p.grad.mul_(factor.view(-1, *[1] * (p.dim() - 1)))
    return norms


def save_atomically(path: str | Path, content: dict) -> None:
    """Writes under another name first: what stands at `path` is always whole."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, f"{path}.part")
    os.replace(f"{path}.part", path)


def load_file(path: str | Path, expected: str, what: str) -> dict:
    if not Path(path).is_file():
        raise ValueError(f"there is no {what} {path}")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        size, reason = Path(path).stat().st_size, str(error).strip().split("\n")[0]
        raise ValueError(f"{path} is no readable {what}, perhaps cut short ({size} bytes): {reason}") from error
    found = saved.get("format") if isinstance(saved, dict) else type(saved).__name__
    if found != expected:
        raise ValueError(f"{path} is no {what} of this script: its format is {found!r}, not {expected!r}")
    return saved


def finite(row: dict[str, float]) -> dict[str, float | None]:
    """JSON knows no nan (the precision of an event that was never predicted, say): null."""
    return {key: value if math.isfinite(value) else None for key, value in row.items()}


def keep_lines(path: Path, counter: str, last: int) -> None:
    """Drops what was logged after the checkpoint."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    path.write_text("".join(line for line in lines if json.loads(line)[counter] <= last))


def interval(values: list[float]) -> tuple[float, float]:
    """mean and half width of its 95 % interval (Student's t over seeds)"""
    values = [v for v in values if not math.isnan(v)]
    if len(values) < 2:
        return (values[0] if values else math.nan), math.nan
    from scipy import stats  # takes half a second to load

    t = float(stats.t.ppf(0.975, len(values) - 1))
    return float(np.mean(values)), t * float(np.std(values, ddof=1)) / math.sqrt(len(values))


if __name__ == "__main__":
    command_line(Args, main)
    if dist.is_initialized():
        dist.destroy_process_group()
