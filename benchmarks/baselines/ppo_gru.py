"""Recurrent PPO on Stag Hunt: one learner with a GRU among rule-based players. What a model of the others
claims to gain, it must gain over this. Eyes, optimiser, logs and checkpoint are those of hopplus_ppo.py.

    python benchmarks/baselines/ppo_gru.py                                    # a partner that stays, 4x4
    python benchmarks/baselines/ppo_gru.py --num-stags 2 --final-time 5       # knowing the partner pays
    python benchmarks/baselines/ppo_gru.py --num-stags 2 --final-time 5 --redraw game  # always a new one
    python benchmarks/baselines/ppo_gru.py --model liam

`--model liam` is LIAM (Papoudakis, Christianos, Albrecht 2021, arXiv 2006.09447): the GRU belongs to an encoder
from whose embedding z a decoder reconstructs what each co-player sees and does at this step. The policy reads
its own observation and z, and its loss does not train the encoder.

Axes: S seeds, E games per seed, B = S*E games, N seats, K = N - 1 co-players, T steps, I inputs, A actions,
n rows of any kind. What the learner reads about players is in its ego order: itself first.
"""

import dataclasses
import math
import os
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
import hopplus_ppo
import stag_hunt_env as game
from hopplus_ppo import masked_mean
from stag_hunt_env import NUM_ACTIONS, STAY, StagHuntConfig, StagHuntEnv

import torch
import tyro
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

CUDA = torch.cuda.is_available()


@dataclasses.dataclass
class Args:
    exp_name: str = Path(__file__).stem  # first part of the run's name
    seed: int = 1  # of the first experiment; the others count up
    num_seeds: int = 1  # S, complete experiments side by side
    device: Literal["cpu", "cuda"] = "cuda" if CUDA else "cpu"
    run_dir: str = "runs"  # where the runs' folders are made
    log_every: int = 5  # iterations between two rows in the logs
    total_timesteps: int = 20_000_000 if CUDA else 1_000_000  # env steps per seed
    cudagraphs: bool = True  # on a GPU: replay whole iterations as one CUDA graph
    model: Literal["gru", "liam"] = "gru"  # what trains its memory: PPO's loss, or reconstruction
    # Who plays
    seats: str = "learner,mixed,nearest_hare,nearest_hare"  # one of them learns
    population: str = "first_stag,last_stag,nearest_hare"  # who plays in mixed seats
    redraw: str = "never"  # mixed seats change after each game, never, or with a probability
    unsteady: float = 0.5  # share of games where they always change, while the state is kept
    keep_state: bool | None = None  # keep the GRU's state from game to game (None: unless --redraw game)
    state_reset_prob: float = 0.005  # how often not: else nobody learns to meet strangers
    # LIAM
    embedding_dim: int = 64  # size of z
    liam_learning_rate: float = 1e-3  # of encoder and decoder; it does not fall
    # PPO
    num_envs: int = 4096 if CUDA else 256  # E, games per seed
    num_steps: int = 32  # T, steps of each game per iteration; gradients go back through as many
    hidden: int = 256 if CUDA else 64  # width of the encoder, of the GRU and of the heads
    learning_rate: float = 1e-3
    anneal_lr: bool = True  # let it fall linearly to a tenth
    update_epochs: int = 4  # passes over each batch
    num_minibatches: int = 4  # minibatches per pass, of whole sequences
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # of generalised advantage estimation
    clip_coef: float = 0.2  # clip range of the ratio
    ent_coef: float = 0.01  # weight of the entropy
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # clip each seed's gradient

    config: StagHuntConfig = dataclasses.field(default_factory=StagHuntConfig)

    def __post_init__(self):
        if self.keep_state is None:
            self.keep_state = self.redraw != "game"


def parse_args() -> Args:
    args = tyro.cli(Args, config=(tyro.conf.OmitArgPrefixes,))
    if game.seats_table(args.seats, args.config.num_players).count("learner") != 1:
        raise ValueError(f"--seats {args.seats}: there must be one learner")
    if args.num_minibatches > args.num_envs:
        raise ValueError("--num-minibatches must be at most --num-envs")
    return args


# ---- Networks
class Linear(nn.Module):
    """A linear layer for each of S seeds, all in one operation"""

    def __init__(self, generators, inputs: int, outputs: int, gain: float = math.sqrt(2)):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(len(generators), inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(len(generators), 1, outputs))
        for weight, generator in zip(self.weight.detach(), generators, strict=True):
            nn.init.orthogonal_(weight, gain, generator)

    def forward(self, x):
        """[S, T, n, inputs] -> [S, T, n, outputs]. One product per step: a weight's gradient, as one
        long sum over all of them, would leave most of a GPU idle."""
        return x @ self.weight[:, None] + self.bias[:, None]


def mlp(generators, sizes: list[int], gain: float):
    """Layers between the sizes; the last one has this gain, and no ReLU after it"""
    layers = []
    for inputs, outputs in pairwise(sizes[:-1]):
        layers += [Linear(generators, inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, Linear(generators, *sizes[-2:], gain))


class Features(nn.Module):
    """What learners see at a step -> MLP. The board is read as in hopplus_ppo.py: players and prey are
    looked up by kind and cell relative to the learner"""

    def __init__(self, args: Args, generators):
        super().__init__()
        config, hidden = args.config, args.hidden
        others = NUM_ACTIONS * config.num_players + 2
        self.sizes = [config.num_players + config.num_prey, config.num_wall_cells, others]
        with torch.random.fork_rng(devices=[]):
            eyes = hopplus_ppo.BoardEncoder(config, hidden)
        self.register_buffer("lookup", eyes.lookup, persistent=False)
        self.register_buffer("entity", eyes.entity, persistent=False)
        tables = [0.1 * torch.randn(eyes.table.shape[1:], generator=generator) for generator in generators]
        self.table = nn.Parameter(torch.stack(tables))
        self.walls = Linear(generators, config.num_cells, 2 * hidden, 1.0) if config.max_wall_pieces else None
        self.board = nn.Sequential(nn.ReLU(), Linear(generators, 2 * hidden, hidden), nn.ReLU())
        self.mix = nn.Sequential(Linear(generators, hidden + others, hidden), nn.ReLU())

    def forward(self, x):
        """[S, T, n, I] -> [S, T, n, hidden]"""
        entities, walls, rest = x.split(self.sizes, 3)
        entities = entities.long()
        row = self.lookup[self.entity, entities[..., :1], entities]
        one_hot = torch.zeros(*row.shape[:3], self.table.shape[1], device=row.device)
        board = one_hot.scatter(3, row, 1.0) @ self.table[:, None]
        if self.walls:
            board = board + self.walls(walls)
        return self.mix(torch.cat([self.board(board), rest], 3))


class GRU(nn.Module):
    """torch.nn.GRU for each of S seeds"""

    def __init__(self, generators, hidden: int):
        super().__init__()
        self.input = Linear(generators, hidden, 3 * hidden, 1.0)
        self.state = Linear(generators, hidden, 3 * hidden, 1.0)

    def forward(self, features, reset, state):
        """[S, T, n, hidden], reset bool [S, T, n], state [S, n, hidden] before the first step -> states
        [S, T, n, hidden]"""
        states = []
        sizes = [2 * state.shape[2], state.shape[2]]
        gates = self.input(features).unbind(1)
        for gate, begins in zip(gates, reset.unbind(1), strict=True):
            state = state.masked_fill(begins[..., None], 0.0)
            own = torch.baddbmm(self.state.bias, state, self.state.weight)
            gate_rz, gate_n = gate.split(sizes, 2)
            own_rz, own_n = own.split(sizes, 2)
            r, z = (gate_rz + own_rz).sigmoid().chunk(2, 2)
            n = torch.addcmul(gate_n, r, own_n).tanh()
            state = torch.lerp(n, state, z)  # (1 - z) * n + z * state
            states.append(state)
        return torch.stack(states, 1)


class Liam(nn.Module):
    """Encoder: the learner's own past -> z; decoders: z -> what each co-player sees and does"""

    def __init__(self, args: Args, generators):
        super().__init__()
        hidden, z = args.hidden, args.embedding_dim
        others = args.config.num_players - 1
        planes = math.prod(args.config.observation_shape)
        self.features = Features(args, generators)
        self.gru = GRU(generators, hidden)
        self.embedding = mlp(generators, [hidden, hidden, z], 1.0)
        self.views = mlp(generators, [z, hidden, hidden, others * planes], 1.0)
        self.actions = mlp(generators, [z, hidden, hidden, others * NUM_ACTIONS], 1.0)

    @property
    def params(self):
        return dict(self.named_parameters())

    def forward(self, x, reset, state):
        """-> z [S, T, n, embedding], the GRU's states [S, T, n, hidden]"""
        states = self.gru(self.features(x), reset, state)
        return self.embedding(states), states


class Agent(nn.Module):
    """S learners: actor and critic read what they see and what they remember"""

    def __init__(self, args: Args, seeds):
        super().__init__()
        hidden = args.hidden
        own = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.features = Features(args, own)
        self.liam = Liam(args, own) if args.model == "liam" else None
        self.gru = GRU(own, hidden) if args.model == "gru" else None
        inputs = hidden + (args.embedding_dim if self.liam else hidden)
        self.actor = mlp(own, [inputs, hidden, NUM_ACTIONS], 0.01)
        self.critic = mlp(own, [inputs, hidden, 1], 1.0)

    @property
    def params(self):
        return dict(self.named_parameters())

    def forward(self, x, legal, reset, state):
        """x [S, T, n, I], legal bool [S, T, n, A], reset bool [S, T, n], the GRU's state [S, n, hidden]
        before the first step -> log-probabilities [S, T, n, A], values [S, T, n], the last state"""
        features = self.features(x)
        if self.liam:
            with torch.no_grad():
                memory, states = self.liam(x, reset, state)
        else:
            memory = states = self.gru(features, reset, state)
        features = torch.cat([features, memory], 3)
        log_probs = self.actor(features).masked_fill(~legal, -1e9).log_softmax(3)
        return log_probs, self.critic(features).squeeze(3), states[:, -1]


# ---- Learners and their games
class Games:
    """Games under way, and what goes on from step to step; overwritten in place"""

    def __init__(self, args: Args, device):
        config = args.config
        self.env = StagHuntEnv(config, args.num_seeds * args.num_envs, device, args.seed)
        self.seats = game.Seats(
            self.env,
            [args.seats] * args.num_seeds,
            population=args.population,
            redraw=args.redraw,
            unsteady=args.unsteady if args.keep_state else 0.0,
        )
        shape = self.seats.learner_seat.shape  # [S, E]
        self.state = torch.zeros(*shape, args.hidden, device=device)  # the GRU's
        self.last_joint = torch.full((*shape, config.num_players), STAY, device=device)
        self.last_reward = torch.zeros(shape, device=device)
        self.reset = torch.ones(shape, dtype=torch.bool, device=device)  # is all of it forgotten?


class TrainState:
    """All that a run changes"""

    def __init__(self, args: Args, rank: int, device):
        self.args = args
        self.device = device
        torch.manual_seed(args.seed)
        self.games = Games(args, device)
        self.env = self.games.env
        seeds = range(args.seed, args.seed + self.games.seats.num_learners)
        agent = Agent(args, seeds).to(device)
        self.networks = {"policy": agent}
        policy = hopplus_ppo.Adam([agent], args.learning_rate, 1e-5, max_norm=args.max_grad_norm)
        self.optimizers = {"policy": policy}
        if agent.liam:  # the policy's loss has no gradient for it
            liam = hopplus_ppo.Adam([agent.liam], args.liam_learning_rate, max_norm=args.max_grad_norm)
            self.optimizers["liam"] = liam


# ---- Rollout
def act(agent: Agent, games: Games, state: game.State):
    """-> what the learners read [S, E, I], their legal actions [S, E, A], log-probabilities [S, E, A],
    values [S, E], the GRU's next state. Where its state is kept, the last step of a game is shown at
    the start of the next: who caught what is in it."""
    env, seats = games.env, games.seats
    cells = seats.to_learners(env.cells(state))
    walls = seats.per_learner(state.walls)[..., : env.config.num_wall_cells]
    joint = F.one_hot(games.last_joint, NUM_ACTIONS).flatten(2)
    clock = seats.per_learner(env.clock(state))
    scalars = torch.stack([clock, games.last_reward], 2)
    x = torch.cat([x.float() for x in (cells, walls, joint, scalars)], 2)
    legal = seats.to_learners(env.legal_actions(state))
    log_probs, value, next_state = agent(x[:, None], legal[:, None], games.reset[:, None], games.state)
    return x, legal, log_probs[:, 0], value[:, 0], next_state


def remember(games: Games, next_state, joint, reward, forget) -> None:
    """What the next step reads; where forget [S, E] nothing of this one"""
    games.state.copy_(next_state)
    games.last_joint.copy_(joint.masked_fill(forget[..., None], STAY))
    games.last_reward.copy_(reward.masked_fill(forget, 0.0))
    games.reset.copy_(forget)


@torch.no_grad()
def rollout(state: TrainState, games: Games) -> tuple[dict, dict]:
    """Plays T steps of all games. -> a dict of [S, T, E, ...] (value: one step more); sums over the
    games that ended [S, N]. A step counts (`mask`) while the learner is on the board; its game has
    `ended` when it leaves. The GRU watches on until the others are done too."""
    args = state.args
    env, seats = games.env, games.seats
    reset_prob = args.state_reset_prob if args.keep_state else 1.0
    steps, values, ends = [], [], []
    for step in range(args.num_steps + 1):
        before = games.state.clone()
        reset = games.reset.clone()
        x, legal, log_probs, value, next_state = act(state.networks["policy"], games, env.state)
        values.append(value)
        if step == args.num_steps:
            break
        mask = seats.to_learners(env.state.present)
        views = seats.to_learners(env.seats_to_ego(env.cells(env.state)))
        actions = game.sample(seats.action_probs(env.state, log_probs.exp()))  # [B, N]
        all_rewards, _, over = env.advance(actions)
        seats.update(over)
        joint = seats.to_learners(env.seats_to_ego(actions))
        reward = seats.to_learners(all_rewards)
        done = seats.per_learner(over)
        forget = done & (torch.rand(done.shape, device=done.device) < reset_prob)
        remember(games, next_state, joint, reward, forget)
        sample = {
            "x": x,
            "legal": legal,
            "reset": reset,
            "state": before,
            "action": joint[..., 0],
            "co_actions": joint[..., 1:],
            "co_views": views[..., 1:, :],  # cells in the co-player's own order
            "log_prob": log_probs.gather(2, joint[..., :1]).squeeze(2),
            "reward": reward,
            "mask": mask,
            "ended": done | ~seats.to_learners(env.state.present),
            "done": done,
        }
        steps.append(sample)
        ends.append(torch.stack([over[:, None] * env.final_return, over[:, None].expand_as(actions)]))
    returns, ended = torch.stack(ends, 1).unflatten(2, (args.num_seeds, -1)).sum((1, 3))
    batch = {name: torch.stack([sample[name] for sample in steps], 1) for name in steps[0]}
    sums = {"games/return": returns, "games/ended": ended}
    return batch | {"value": torch.stack(values, 1)}, sums


# ---- PPO
def make_ppo_batch(args: Args, steps: dict, real: bool = True) -> tuple[dict, dict]:
    """Steps [S, T, E, ...] -> sequences with advantages and returns; {}, no metrics. Fewer games
    than minibatches are cut into shorter sequences."""
    value, reward, mask = steps["value"], steps["reward"], steps["mask"]
    advantages = []
    ahead = torch.zeros_like(reward[:, 0])
    for t in reversed(range(reward.shape[1])):
        go_on = (~steps["ended"][:, t]).float()  # no value is taken from beyond an end
        delta = reward[:, t] + args.gamma * go_on * value[:, t + 1] - value[:, t]
        ahead = (delta + args.gamma * args.gae_lambda * go_on * ahead) * mask[:, t]
        advantages.append(ahead)
    advantage = torch.stack(advantages[::-1], 1)
    returns = advantage + value[:, :-1]
    names = ("x", "legal", "reset", "state", "action", "log_prob", "mask", "co_actions", "co_views")
    batch = {name: steps[name] for name in names}
    batch |= {"advantage": advantage, "returns": returns}
    if mask.shape[2] < args.num_minibatches:
        parts = math.gcd(mask.shape[1], args.num_minibatches)
        for name, x in batch.items():
            batch[name] = x.unflatten(1, (parts, -1)).movedim(1, 2).flatten(2, 3)
    batch["state"] = batch["state"][:, 0]  # before each sequence
    return batch, {}


def ppo_loss(args: Args, agent: Agent, mb: dict):
    """A minibatch of sequences [S, T, n, ...] -> each seed's loss [S], metrics [S]"""
    log_probs, value, _ = agent(mb["x"], mb["legal"], mb["reset"], mb["state"])
    log_ratio = log_probs.gather(3, mb["action"][..., None]).squeeze(3) - mb["log_prob"]
    ratio = log_ratio.exp()
    mask = mb["mask"]
    advantage = mb["advantage"] - masked_mean(mb["advantage"], mask).view(-1, 1, 1)
    deviation = masked_mean(advantage.square(), mask).sqrt()
    advantage = advantage / (deviation.view(-1, 1, 1) + 1e-8)
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = masked_mean(torch.maximum(-advantage * ratio, -advantage * clipped), mask)
    value_loss = masked_mean(0.5 * (value - mb["returns"]).square(), mask)
    entropy = masked_mean(-(log_probs.exp() * log_probs).sum(3), mask)
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    metrics = {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": masked_mean(ratio - 1 - log_ratio, mask),
    }
    return loss, metrics


def liam_loss(config: StagHuntConfig, liam: Liam, mb: dict):
    """Reconstruction of what each co-player on the board sees and does -> each seed's loss [S], metrics [S]"""
    z, _ = liam(mb["x"], mb["reset"], mb["state"])
    views, actions = mb["co_views"], mb["co_actions"]  # [S, T, n, K, N + P], [S, T, n, K]
    present = views[..., 0] < config.num_cells
    _, walls, _ = mb["x"].split(liam.features.sizes, 3)
    planes = game.planes(config, views, walls[..., None, :]).flatten(4).float()
    error = liam.views(z).unflatten(3, planes.shape[3:]) - planes
    view_loss = masked_mean(0.5 * error.square().sum(4), present)
    log_probs = liam.actions(z).unflatten(3, (-1, NUM_ACTIONS)).log_softmax(4)
    action_loss = masked_mean(-log_probs.gather(4, actions[..., None]).squeeze(4), present)
    metrics = {
        "losses/liam_views": view_loss,
        "losses/liam_actions": action_loss,
        "liam/top1": masked_mean((log_probs.argmax(4) == actions).float(), present),
    }
    return view_loss + action_loss, metrics


def minibatches(args: Args, batch: dict):
    """Sequences [S, T, E, ...] in one random order for all seeds, --update-epochs times"""
    for _ in range(args.update_epochs):
        order = torch.rand(batch["x"].shape[2], device=batch["x"].device).argsort()
        for index in order.tensor_split(args.num_minibatches):
            mb = {name: x[:, :, index] for name, x in batch.items() if name != "state"}
            yield mb | {"state": batch["state"][:, index]}


def ppo_update(state: TrainState, batch: dict) -> dict:
    """-> means [S]. LIAM's encoder learns after PPO, whose ratio compares policies of the same z"""
    agent = state.networks["policy"]
    losses = {"policy": lambda mb: ppo_loss(state.args, agent, mb)}
    if agent.liam:
        losses["liam"] = lambda mb: liam_loss(state.args.config, agent.liam, mb)
    means = {}
    for name, loss_of in losses.items():
        updates = []
        for mb in minibatches(state.args, batch):
            loss, metrics = loss_of(mb)
            norm = state.optimizers[name].step(loss)
            updates.append(metrics | ({"losses/grad_norm": norm} if name == "policy" else {}))
        means |= {key: torch.stack([x[key].detach() for x in updates]).mean(0) for key in updates[0]}
    return means


def train_iteration(state: TrainState) -> dict:
    """Captured as one CUDA graph: nothing in it waits for the host. -> metrics [S], games/ [S, N]"""
    steps, metrics = rollout(state, state.games)
    batch, _ = make_ppo_batch(state.args, steps)
    return metrics | ppo_update(state, batch)


# ---- Main
def save_checkpoint(path: Path, state: TrainState) -> None:
    """Flags, and weights of all seeds [S, ...]"""
    weights = {"policy": state.networks["policy"].state_dict()}
    content = {"format": "ppo_gru 4", "script": Path(__file__).name}
    content |= {"args": dataclasses.asdict(state.args), "states": [{"networks": weights}]}
    hopplus_ppo.write_checkpoint(path, content)


def main(args: Args) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # sums in the same order
    torch.backends.cuda.matmul.allow_tf32 = True
    state = TrainState(args, 0, torch.device(args.device))
    seat = game.seats_table(args.seats, args.config.num_players).index("learner")
    folders = hopplus_ppo.make_folders(args, args.model)
    writers = [hopplus_ppo.open_log(args, folder, 0) for folder in folders]
    print(folders[0])

    iterate = partial(train_iteration, state)
    num_iterations = math.ceil(args.total_timesteps / (args.num_envs * args.num_steps))
    sums = {}
    began = time.monotonic()
    for iteration in tqdm(range(1, num_iterations + 1)):
        decay = 0.9 * args.anneal_lr * (iteration - 1) / num_iterations
        learning_rate = args.learning_rate * (1 - decay)
        state.optimizers["policy"].learning_rate.fill_(learning_rate)
        if iteration == 2:  # the first one warms up
            iterate = hopplus_ppo.capture(iterate, state)
        sums = {name: x + sums.get(name, 0.0) for name, x in iterate().items()}
        if iteration % args.log_every and iteration < num_iterations:
            continue
        step = iteration * args.num_envs * args.num_steps
        speed = step / (time.monotonic() - began)
        shared = {"charts/learning_rate": learning_rate, "time/SPS": speed}
        returns = (sums.pop("games/return") / sums.pop("games/ended"))[:, seat].tolist()
        found = {name: x.tolist() for name, x in sums.items()}
        sums = {}
        for number, (folder, writer) in enumerate(zip(folders, writers, strict=True)):
            row = {"charts/episodic_return": returns[number]} | shared
            for name, x in found.items():
                row[name] = x[number] / ((iteration - 1) % args.log_every + 1)
            bad = [name for name, x in row.items() if name.startswith("losses/") and not math.isfinite(x)]
            hopplus_ppo.refuse(bad != [], f"{bad} no number in iteration {iteration}, or since the last row")
            hopplus_ppo.log(folder, writer, step, row, {})
    save_checkpoint(folders[0] / "checkpoint.pt", state)
    print(f"python evaluation/adapt.py {folders[0]}")


if __name__ == "__main__":
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        args = parse_args()
    except ValueError as error:  # the game's, about wrong flags
        sys.exit(f"error: {error}")
    main(args)
