"""A hunter that nobody trained: adapt.py shows what it earns in the learner's place.

The Bayes hunter sits in the learner's seat. It knows the rules of random, nearest_stag and
nearest_hare, infers who of these each co-player is from what it did in this game, and walks to what
pays most: a hare, or a stag, as likely as somebody comes for it who is in time.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stag_hunt_env as game

import torch


def stag_hunters(env, state, name, distances):
    """bool [B, stags, N]: whether a player of this name goes for that stag. distances [B, stags, N]"""
    if name == "nearest_stag":
        return distances == distances.amin(1, keepdim=True)
    goes = torch.zeros_like(distances, dtype=torch.bool)
    if name in ("first_stag", "last_stag"):
        sign = 1 if name == "first_stag" else -1
        cell = sign * state.prey_position[:, : env.config.num_stags]
        cell = cell.masked_fill(~state.prey_alive[:, : env.config.num_stags], game.FAR)
        goes |= (cell == cell.amin(1, keepdim=True))[..., None]
    return goes


def bayes_probs(env, seats, posterior):
    """[M, E, 7] in the learner's seat, one in each game"""
    state, config = env.state, env.config
    stags = config.num_stags
    places = torch.arange(env.num_envs, device=env.device)
    seat = seats.learner_seat.flatten()
    one_prey = torch.eye(config.num_prey, dtype=torch.bool, device=env.device)
    distances = []
    for prey in range(config.num_prey):
        alone = state._replace(prey_alive=state.prey_alive & one_prey[prey])
        hunt = game.HUNT_STAG if prey < stags else game.HUNT_HARE
        distance = env.distance_to_prey(alone, hunt)
        distances.append(distance.gather(1, state.position.long()))
    distances = torch.stack(distances, 1)  # [B, prey, N]
    own = distances[places, :, seat]
    steps_left = (config.final_time - state.time)[:, None]
    to_hares = own.clone()
    to_hares[:, :stags] = game.FAR
    nearest = to_hares == to_hares.amin(1, keepdim=True)
    pays = config.hare_reward * (nearest & (to_hares < steps_left))  # [B, prey]
    if stags:
        to_stags = distances[:, :stags]
        goes = [stag_hunters(env, state, name, to_stags) for name in seats.population]
        both = torch.maximum(own[:, :stags, None], to_stags)
        in_time = (both < steps_left[..., None]) & state.present[:, None]
        comes = (posterior.probs()[:, None] * torch.stack(goes, 3)).sum(3) * in_time
        comes[places, :, seat] = 0.0
        pays[:, :stags] = (1 - (1 - comes).prod(2)) * config.stag_reward / 2
    goal = pays.argmax(1)
    alone = state._replace(prey_alive=state.prey_alive & one_prey[goal])
    legal = env.legal_actions(state)
    to_stag = game.hunter_probs(env, alone, legal, game.HUNT_STAG)[places, seat]
    to_hare = game.hunter_probs(env, alone, legal, game.HUNT_HARE)[places, seat]
    probs = torch.where((goal < stags)[:, None], to_stag, to_hare)
    return probs.view(*seats.learner_seat.shape, game.NUM_ACTIONS)
