"""Recurrent PPO on Stag Hunt: one learner with a GRU among rule-based players, and no model of anybody. What a model of
the others claims to gain, it must gain over this. Also the shortest complete example of how to train on this game.

    python benchmarks/baselines/ppo_gru.py                                    # a partner that stays, 4x4
    python benchmarks/baselines/ppo_gru.py --num-stags 2 --final-time 5       # little time: knowing the partner pays
    python benchmarks/baselines/ppo_gru.py --num-stags 2 --final-time 5 --redraw game      # a new one in every game
    python benchmarks/baselines/ppo_gru.py --seats learner,nearest_stag,nearest_hare,random --num-seeds 5

Axes: S seeds, E games per seed, B = S*E games, N seats, T steps, I inputs, A actions, n rows of any kind. What the
learner reads about players is in its ego order: itself first.
"""

import dataclasses
import functools
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
import stag_hunt_env as game
from stag_hunt_env import NUM_ACTIONS, STAY, Count, Fraction, NonNegative, Positive, StagHuntConfig, StagHuntEnv, Whole

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

FORMAT = "ppo-gru-2"  # of a checkpoint
NOT_LEARNED_FROM = ("done", "final_return", "value")  # of what `rollout` returns

# ---- Arguments. Class defaults are for a GPU; make_args changes them by device.


@dataclasses.dataclass
class TrainArgs:
    exp_name: str = Path(__file__).stem
    """first part of the run's name"""
    seed: Whole = 1
    """seed of the first experiment; the others count up from it"""
    num_seeds: Count = 1
    """S, complete experiments side by side, each with its own weights and TensorBoard run"""
    seats: str = "learner,mixed,nearest_hare,nearest_hare"
    """who sits where, one name a seat: one learner; mixed, a player or a stranger"""
    population: str = "first_stag,last_stag,nearest_hare"
    """the players that mixed seats draw from"""
    redraw: str = "never"
    """when a mixed seat gets a new player: after each game, never, or after a game with this probability"""
    unsteady: Fraction = 0.5
    """share of the places whose mixed seats get a new player after each game whatever --redraw says
    (without --keep-state: none)"""
    keep_state: bool = True
    """keep the GRU's state from game to game (default: unless --redraw game)"""
    state_reset_prob: Fraction = 0.005
    """how often it is reset after a game all the same: else nobody learns to play with strangers"""
    total_timesteps: Count = 20_000_000
    """env steps per seed"""
    num_envs: Count = 4096
    """E, games per seed"""
    num_steps: Count = 32
    """T, steps of each game per iteration; gradients go back through as many"""
    hidden: Count = 256
    """width of the encoder, of the GRU and of the heads"""
    learning_rate: Positive = 1e-3
    """Adam's step size"""
    anneal_lr: bool = True
    """let it fall linearly to a tenth"""
    update_epochs: Count = 4
    """passes over each batch"""
    num_minibatches: Count = 4
    """minibatches per pass, each of whole games"""
    gamma: Fraction = 0.99
    """discount"""
    gae_lambda: Fraction = 0.95
    """lambda of generalised advantage estimation"""
    clip_coef: Positive = 0.2
    """clip range of the ratio"""
    ent_coef: NonNegative = 0.01
    """weight of the entropy"""
    vf_coef: NonNegative = 0.5
    """weight of the value loss"""
    max_grad_norm: Positive = 0.5
    """clip each seed's gradient to this norm"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train; auto: on the GPU if there is one"""
    cudagraphs: bool = True
    """on a GPU: replay whole iterations as one CUDA graph"""
    run_dir: str = "runs"
    """folder in which the runs' folders are made"""
    log_every: Count = 5
    """iterations between two rows in the logs"""


@dataclasses.dataclass
class Args(TrainArgs):
    config: StagHuntConfig = dataclasses.field(default_factory=StagHuntConfig)


GROUPS = {"training": TrainArgs, "game": StagHuntConfig}  # boxes of --help


def make_args(device: str = "auto", redraw: str = "never", **changes) -> Args:
    """Complete flags: where tests, sweeps and the command line start"""
    values = {"device": device, "redraw": redraw, "keep_state": game.redraw_prob(redraw) < 1}
    if game.resolve_device(device).type == "cpu":
        values |= {"num_envs": 256, "total_timesteps": 1_000_000, "hidden": 64}
    return Args(**{**values, **changes})


def parse_args(words: list[str]) -> Args:
    default = make_args(**game.early_flags(words, device="auto", redraw="never"))
    return game.parse(Args, GROUPS, default, words)


# ---- Networks


class Linear(nn.Module):
    """A linear layer for each of S seeds, all in one operation"""

    def __init__(self, generators: list[torch.Generator], inputs: int, outputs: int, gain: float = math.sqrt(2)):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(len(generators), inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(len(generators), 1, outputs))
        for weight, generator in zip(self.weight.detach(), generators, strict=True):
            nn.init.orthogonal_(weight, gain, generator)

    def forward(self, x):
        """[S, T, n, inputs] -> [S, T, n, outputs]. One product per step: a weight's gradient, as one long sum over all
        of them, would leave most of a GPU idle."""
        return x @ self.weight[:, None] + self.bias[:, None]


class BoardEncoder(nn.Module):
    """The eyes that hopplus_ppo.py has: each thing on the board is looked up by its kind and its cell relative to the
    learner, or by its number if it is not there; what is found adds up."""

    def __init__(self, config: StagHuntConfig, own: list[torch.Generator], hidden: int):
        super().__init__()
        players = config.num_players
        cells = config.num_cells
        wide = 2 * config.width - 1
        spots = (2 * config.height - 1) * wide
        row, column = np.divmod(np.arange(cells), config.width)
        down = row - row[:, None] + config.height - 1
        right = column - column[:, None] + config.width - 1
        kinds = [*range(players), *[players] * config.num_stags, *[players + 1] * config.num_hares]
        entity = np.arange(len(kinds))
        own_row = spots * (players + 2)  # the learner itself is looked up by its cell on the board
        lookup = np.empty((len(kinds), cells + 1, cells + 1), int)  # [entity, own cell, its cell]
        lookup[:] = (own_row + cells + entity)[:, None, None]  # not there
        lookup[:, :cells, :cells] = spots * np.array(kinds)[:, None, None] + down * wide + right
        lookup[:, cells] = lookup[:, 0]  # a learner that has left sees the board from its first cell
        lookup[0, :cells] = own_row + np.arange(cells)[:, None]
        rows = own_row + cells + len(kinds)
        rows += -rows % 8  # a GPU reads rows faster that begin at multiples of 16 bytes
        self.register_buffer("lookup", torch.tensor(lookup), persistent=False)
        self.register_buffer("entity", torch.tensor(entity), persistent=False)
        self.table = nn.Parameter(torch.stack([0.1 * torch.randn(rows, 2 * hidden, generator=each) for each in own]))
        self.walls = Linear(own, cells, 2 * hidden, 1.0) if config.max_wall_pieces else None
        self.mix = nn.Sequential(nn.ReLU(), Linear(own, 2 * hidden, hidden), nn.ReLU())

    def forward(self, entities, walls):
        """int64 [S, T, n, N + P], [S, T, n, H*W] -> [S, T, n, hidden]"""
        row = self.lookup[self.entity, entities[..., :1], entities]
        found = torch.zeros(*row.shape[:3], self.table.shape[1], device=row.device).scatter(3, row, 1.0)
        x = found @ self.table[:, None]  # as a lookup, but its gradient is a product too: a lookup's is slow on a GPU
        return self.mix(x if self.walls is None else x + self.walls(walls))


class Agent(nn.Module):
    """S learners: what they see -> MLP -> GRU; actor and critic read both"""

    def __init__(self, args: Args, seeds: list[int]):
        super().__init__()
        config, hidden, own = args.config, args.hidden, [torch.Generator().manual_seed(seed) for seed in seeds]
        walls = config.num_cells if config.max_wall_pieces else 0
        self.sizes = [config.num_players + config.num_prey, walls, NUM_ACTIONS * config.num_players + 2]
        self.encoder = BoardEncoder(config, own, hidden)
        self.mix = nn.Sequential(Linear(own, hidden + self.sizes[2], hidden), nn.ReLU())
        self.gru_input = Linear(own, hidden, 3 * hidden, 1.0)
        self.gru_state = Linear(own, hidden, 3 * hidden, 1.0)
        self.actor = nn.Sequential(Linear(own, 2 * hidden, hidden), nn.ReLU(), Linear(own, hidden, NUM_ACTIONS, 0.01))
        self.critic = nn.Sequential(Linear(own, 2 * hidden, hidden), nn.ReLU(), Linear(own, hidden, 1, 1.0))

    def forward(self, x, legal, reset, state):
        """x [S, T, n, I], legal bool [S, T, n, A], reset bool [S, T, n], the GRU's state [S, n, hidden] before the
        first step -> log-probabilities [S, T, n, A], values [S, T, n], the state after the last step"""
        entities, walls, rest = x.split(self.sizes, 3)
        features = self.mix(torch.cat([self.encoder(entities.long(), walls), rest], 3))
        states = []
        for gate, starts in zip(self.gru_input(features).unbind(1), reset.unbind(1), strict=True):
            state = self.gru_step(gate, state.masked_fill(starts[..., None], 0.0))
            states.append(state)
        features = torch.cat([features, torch.stack(states, 1)], 3)
        log_probs = self.actor(features).masked_fill(~legal, -1e9).log_softmax(3)
        return log_probs, self.critic(features).squeeze(3), state

    def gru_step(self, gate, state):
        """torch.nn.GRUCell, its inputs multiplied already: [S, n, 3 * hidden], [S, n, hidden] -> [S, n, hidden]"""
        own = torch.baddbmm(self.gru_state.bias, state, self.gru_state.weight)
        sizes = [2 * state.shape[2], state.shape[2]]
        (gate_rz, gate_n), (own_rz, own_n) = (x.split(sizes, 2) for x in (gate, own))
        r, z = (gate_rz + own_rz).sigmoid().chunk(2, 2)
        n = torch.addcmul(gate_n, r, own_n).tanh()
        return torch.lerp(n, state, z)  # (1 - z) * n + z * state


# ---- Rollout


class RolloutState(NamedTuple):
    """What goes on from one rollout to the next; overwritten in place"""

    state: torch.Tensor  # [S, E, hidden] the GRU's
    last_joint: torch.Tensor  # int64 [S, E, N] what everybody did in the step before
    last_reward: torch.Tensor  # [S, E] what the learner got for it
    reset: torch.Tensor  # bool [S, E] and whether all of this is forgotten


def agent_inputs(env: StagHuntEnv, state: game.State, seats, rollout_state: RolloutState):
    """Where everybody and the prey are (H*W: gone), walls, and what the last step showed -> [S, E, I]. Where the GRU's
    state is kept, the last step of a game is shown at the start of the next: who caught what is in it."""
    nowhere = env.config.num_cells
    players = seats.to_learners(env.seats_to_ego(torch.where(state.present, state.position, nowhere)))
    prey = seats.per_learner(torch.where(state.prey_alive, state.prey_position, nowhere))
    walls = seats.per_learner(state.walls)[..., : nowhere if env.config.max_wall_pieces else 0]
    joint = F.one_hot(rollout_state.last_joint, NUM_ACTIONS).flatten(2)
    clock = seats.per_learner(env.clock(state))
    scalars = torch.stack([clock, rollout_state.last_reward], 2)
    return torch.cat([x.float() for x in (players, prey, walls, joint, scalars)], 2)


@torch.no_grad()
def rollout(args: Args, env: StagHuntEnv, seats: game.Seats, agent: Agent, rollout_state: RolloutState) -> dict:
    """Plays T steps of all games -> what happened [S, T, E, ...]; `value` is [S, T + 1, E], `state` [S, E, hidden] is
    the GRU's before the first step. A step counts (`mask`) while the learner is on the board; its game has `ended` when
    it leaves. The GRU watches on until the others are done too."""
    steps, values, first_state = [], [], rollout_state.state.clone()
    reset_prob = args.state_reset_prob if args.keep_state else 1.0
    for step in range(args.num_steps + 1):
        x = agent_inputs(env, env.state, seats, rollout_state)
        legal = seats.to_learners(env.legal_actions(env.state))
        reset = rollout_state.reset.clone()
        log_probs, value, state = agent(x[:, None], legal[:, None], reset[:, None], rollout_state.state)
        values.append(value[:, 0])
        if step == args.num_steps:
            break
        mask = seats.to_learners(env.state.present)
        actions = game.sample(seats.action_probs(env.state, log_probs[:, 0].exp()))  # [B, N]
        _, all_rewards, present_before, all_done = env.step(actions)
        seats.update(actions, present_before, all_done)
        joint = seats.to_learners(env.seats_to_ego(actions))
        log_prob = log_probs[:, 0].gather(2, joint[..., :1]).squeeze(2)
        reward = seats.to_learners(all_rewards)
        done = seats.per_learner(all_done)
        ended = done | ~seats.to_learners(env.state.present)
        forget = done & (torch.rand(done.shape, device=done.device) < reset_prob)
        last_joint, last_reward = joint.masked_fill(forget[..., None], STAY), reward.masked_fill(forget, 0.0)
        for kept, new in zip(rollout_state, (state, last_joint, last_reward, forget), strict=True):
            kept.copy_(new)
        fields = {"x": x, "legal": legal, "reset": reset, "action": joint[..., 0], "log_prob": log_prob}
        fields |= {"reward": reward, "mask": mask, "ended": ended, "done": done}
        steps.append(fields | {"final_return": seats.to_learners(env.final_return)})
    batch = {name: torch.stack([fields[name] for fields in steps], 1) for name in steps[0]}
    return batch | {"value": torch.stack(values, 1), "state": first_state}


# ---- PPO


def compute_gae(args: Args, reward, value, ended, mask):
    """[S, T, E], value [S, T + 1, E] -> advantages [S, T, E]. An end is a true end: no value from beyond it."""
    advantages = []
    ahead = torch.zeros_like(reward[:, 0])
    for t in reversed(range(reward.shape[1])):
        go_on = (~ended[:, t]).float()
        delta = reward[:, t] + args.gamma * go_on * value[:, t + 1] - value[:, t]
        ahead = (delta + args.gamma * args.gae_lambda * go_on * ahead) * mask[:, t]
        advantages.append(ahead)
    return torch.stack(advantages[::-1], 1)


def with_advantages(args: Args, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `rollout` returned -> what `ppo_update` reads"""
    advantage = compute_gae(args, batch["reward"], batch["value"], batch["ended"], batch["mask"])
    sequences = {name: x for name, x in batch.items() if name not in NOT_LEARNED_FROM}
    sequences["advantage"] = advantage
    sequences["returns"] = advantage + batch["value"][:, :-1]
    return sequences


def masked_mean(x, mask):
    """[S, ...] -> [S]: the mean where mask [S, ...] holds"""
    return (x * mask).flatten(1).sum(1) / mask.flatten(1).sum(1).clamp(min=1)


def ppo_loss(args: Args, agent: Agent, mb: dict[str, torch.Tensor]):
    """A minibatch of whole sequences [S, T, n, ...] -> each seed's loss [S], metrics [S]"""
    log_probs, value, _ = agent(mb["x"], mb["legal"], mb["reset"], mb["state"])
    log_ratio = log_probs.gather(3, mb["action"][..., None]).squeeze(3) - mb["log_prob"]
    ratio, mask = log_ratio.exp(), mb["mask"]
    advantage = mb["advantage"] - masked_mean(mb["advantage"], mask).view(-1, 1, 1)
    advantage = advantage / (masked_mean(advantage.square(), mask).sqrt().view(-1, 1, 1) + 1e-8)
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = masked_mean(torch.maximum(-advantage * ratio, -advantage * clipped), mask)
    value_loss = masked_mean(0.5 * (value - mb["returns"]).square(), mask)
    entropy = masked_mean(-(log_probs.exp() * log_probs).sum(3), mask)
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    metrics["approx_kl"] = masked_mean(ratio - 1 - log_ratio, mask)
    metrics["clipfrac"] = masked_mean(((ratio - 1).abs() > args.clip_coef).float(), mask)
    return loss, {name: x.detach() for name, x in metrics.items()}


def ppo_update(args: Args, agent: Agent, optimizer, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """PPO on sequences [S, T, E, ...], in one random order for all seeds; each gradient is clipped. -> means [S]"""
    found = []
    for _ in range(args.update_epochs):
        order = torch.rand(batch["x"].shape[2], device=batch["x"].device).argsort()
        for games in order.tensor_split(args.num_minibatches):
            mb = {name: x.index_select(1 if name == "state" else 2, games) for name, x in batch.items()}
            loss, metrics = ppo_loss(args, agent, mb)
            optimizer.zero_grad()
            loss.sum().backward()
            norm = torch.cat([p.grad.flatten(1) for p in agent.parameters()], 1).norm(dim=1)
            factor = (args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            for p in agent.parameters():
                p.grad.mul_(factor.view(-1, 1, 1))
            optimizer.step()
            found.append(metrics | {"grad_norm": norm})
    return {f"losses/{name}": torch.stack([metrics[name] for metrics in found]).mean(0) for name in found[0]}


def train_iteration(args: Args, env, seats, agent, optimizer, rollout_state) -> dict[str, torch.Tensor]:
    """One iteration; captured as one CUDA graph, nothing in it waits for the host. -> metrics [S]"""
    played = rollout(args, env, seats, agent, rollout_state)
    done = played["done"]
    metrics = {"games": done.sum((1, 2)).float(), "return": (done * played["final_return"]).sum((1, 2))}
    batch = with_advantages(args, played)
    errors, mask = (batch["advantage"], batch["returns"]), batch["mask"]  # of the critic, and of one that says the mean
    unexplained, variance = (masked_mean(x.square(), mask) - masked_mean(x, mask).square() for x in errors)
    metrics["losses/explained_variance"] = 1 - unexplained / variance.clamp(min=1e-8)
    return metrics | ppo_update(args, agent, optimizer, batch)


# ---- Main


def capture(function, env: StagHuntEnv):
    """The same function as the replay of one CUDA graph, whose result stays in place. Call it once before."""
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(env.generator)
    with torch.cuda.graph(graph):
        result = function()
    return lambda: graph.replay() or result  # replay returns None


def make_games(args: Args, tables: list):
    """-> E games at each of S tables, of one learner each; who sits there; the rollout's state"""
    device = game.resolve_device(args.device)
    torch.manual_seed(args.seed)
    env = StagHuntEnv(args.config, len(tables) * args.num_envs, device, args.seed)
    seats = game.Seats(
        env,
        tables,
        population=args.population,
        redraw=args.redraw,
        unsteady=args.unsteady if args.keep_state else 0.0,
    )
    return env, seats, first_rollout_state(args, (len(tables), args.num_envs), device)


def first_rollout_state(args: Args, rows: tuple[int, int], device) -> RolloutState:
    """rows: S, E"""
    return RolloutState(
        state=torch.zeros(*rows, args.hidden, device=device),
        last_joint=torch.full((*rows, args.config.num_players), STAY, device=device),
        last_reward=torch.zeros(rows, device=device),
        reset=torch.ones(rows, dtype=torch.bool, device=device),
    )


def make_optimizer(args: Args, agent: Agent):
    device = next(agent.parameters()).device
    rate = torch.tensor(args.learning_rate, device=device)  # a tensor: a CUDA graph reads it anew
    return torch.optim.Adam(agent.parameters(), lr=rate, eps=1e-5, fused=True, capturable=True)


def make_training(args: Args):
    """-> all that a run changes: the games, who sits where, the learners, their optimiser, the rollout's state"""
    env, seats, rollout_state = make_games(args, [args.seats] * args.num_seeds)
    agent = Agent(args, list(range(args.seed, args.seed + args.num_seeds))).to(env.device)
    return env, seats, agent, make_optimizer(args, agent), rollout_state


def make_run_folders(args: Args) -> list[Path]:
    """One folder per seed, each with the flags"""
    try:
        folders = game.new_folders(args, args.config.setting)
        for folder in folders:
            (folder / "args.json").write_text(json.dumps(dataclasses.asdict(args), indent=2) + "\n")
    except OSError as error:
        raise game.UserError(f"could not write to {error.filename}: {error.strerror}") from error
    return folders


def save_checkpoint(path: Path, args: Args, agent: Agent, number: int) -> None:
    """The weights of one seed, [1, ...] each. Written under another name first: what stands at `path` is whole"""
    weights = {name: p[number : number + 1].cpu().clone() for name, p in agent.state_dict().items()}
    flags = dataclasses.asdict(args) | {"seed": args.seed + number, "num_seeds": 1}
    torch.save({"format": FORMAT, "args": flags, "agent": weights}, f"{path}.part")
    os.replace(f"{path}.part", path)


def main(args: Args) -> dict[str, float]:
    """Returns the last logged metrics, averaged over seeds."""
    game.check_ranges(args)
    learners = game.seats_table(args.seats, args.config.num_players).count("learner")
    game.refuse(learners != 1, f"--seats {args.seats}: there must be 1 learner, not {learners}")
    games, minibatches = args.num_envs, args.num_minibatches
    game.refuse(minibatches > games, f"--num-minibatches {minibatches} exceeds --num-envs {games}")
    game.check_run_flags(args)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # sums in the same order in each run
    torch.set_float32_matmul_precision("high")  # on a GPU: tf32
    env, _, agent, optimizer, _ = training = make_training(args)
    iterate = functools.partial(train_iteration, args, *training)
    folders = make_run_folders(args)
    writers = [SummaryWriter(folder) for folder in folders]
    flags = "\n".join(f"|{name}|{value}|" for name, value in dataclasses.asdict(args).items())
    for writer in writers:
        writer.add_text("hyperparameters", f"|flag|value|\n|-|-|\n{flags}")
    print(f"{args.config.setting}, {args.seats}, {args.num_seeds} seed(s), on {env.device}; run folder {folders[0]}")
    steps_each = args.num_envs * args.num_steps
    num_iterations = math.ceil(args.total_timesteps / steps_each)
    bar = tqdm(total=num_iterations * steps_each, unit="step", unit_scale=True, mininterval=1)
    sums, began, first_step = {}, time.time(), 0
    for iteration in range(1, num_iterations + 1):
        learning_rate = args.learning_rate * (1 - 0.9 * args.anneal_lr * (iteration - 1) / num_iterations)
        optimizer.param_groups[0]["lr"].fill_(learning_rate)
        if iteration == 1 and args.cudagraphs and env.device.type == "cuda":  # it warms up, the rest are replayed
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                metrics = iterate()
            torch.cuda.synchronize()
            iterate = capture(iterate, env)
            began, first_step = time.time(), steps_each
        else:
            metrics = iterate()
        sums = {name: x + sums.get(name, 0.0) for name, x in metrics.items()}
        if iteration % args.log_every and iteration < num_iterations:
            continue
        step, count = iteration * steps_each, (iteration - 1) % args.log_every + 1
        means = {name: (x / count).tolist() for name, x in sums.items()}  # the only read from the device
        sums = {}
        shared = {"charts/learning_rate": learning_rate, "charts/SPS": (step - first_step) / (time.time() - began)}
        rows = []
        for number, (folder, writer) in enumerate(zip(folders, writers, strict=True)):
            row = {name: values[number] for name, values in means.items()}
            games, total = row.pop("games"), row.pop("return")
            row = {"charts/episodic_return": total / games if games else math.nan, **row, **shared}
            for name, value in row.items():
                if math.isfinite(value):
                    writer.add_scalar(name, value, step)
                if name.startswith("losses/") and not math.isfinite(value):
                    raise FloatingPointError(f"{name} is {value} (seed {args.seed + number}, iteration {iteration})")
            shown = {name: value if math.isfinite(value) else None for name, value in row.items()}
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"steps": step, **shown}) + "\n")
            if iteration == num_iterations:
                save_checkpoint(folder / "checkpoint.pt", args, agent, number)
                writer.close()
            rows.append(row)
        final = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
        bar.set_postfix_str(f"return {final['charts/episodic_return']:.3f}", refresh=False)
        bar.update(step - bar.n)
    bar.close()
    print(f"{time.time() - began:.1f} s of training; checkpoint {folders[0]}/checkpoint.pt")
    return {"checkpoint": str(folders[0] / "checkpoint.pt"), **final}


if __name__ == "__main__":
    game.command_line(parse_args, main)
