"""adapt.py beside six kinds of players that were written when all settings were fixed.

    python benchmarks/unseen.py runs/RUN --best-response-steps 8000000
    python benchmarks/unseen.py runs/RUN --no-references

`slow_stag` stays in every second step, else it is `nearest_stag`. `gives_up` hunts the stag for 12
steps, then hares. `cautious` hunts the stag while no hare is nearer. `contrarian` does so while nobody
else stands at a stag or beside it. `far_hare` hunts the living hare that is farthest from the stag.
`wanderer` walks about at random and hunts what it meets.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from evaluation import adapt
from stag_hunt_env import HUNT_HARE, HUNT_STAG, PLAYER_PROBS, STAY, hunter_probs

import torch
import tyro


def either(env, state, legal, hunts_stag):
    """hunts_stag [B, N]: else hares"""
    stag = hunter_probs(env, state, legal, HUNT_STAG)
    return torch.where(hunts_stag[..., None], stag, hunter_probs(env, state, legal, HUNT_HARE))


def distance(env, state, prey):
    """From each player to the nearest such prey [B, N]"""
    return env.distance_to_prey(state, prey).gather(1, state.position.long())


def slow_stag_probs(env, state, legal):
    stays = (env.action == STAY).float()
    return (stays + hunter_probs(env, state, legal, HUNT_STAG)) / 2


def gives_up_probs(env, state, legal):
    return either(env, state, legal, (state.time < 12)[:, None].expand_as(state.position))


def cautious_probs(env, state, legal):
    return either(env, state, legal, distance(env, state, HUNT_STAG) <= distance(env, state, HUNT_HARE))


def contrarian_probs(env, state, legal):
    near = (distance(env, state, HUNT_STAG) <= 1) & state.present
    others = near.sum(1, keepdim=True) - near.int()
    return either(env, state, legal, others == 0)


def far_hare_probs(env, state, legal):
    from_stag = env.distance_to_prey(state, HUNT_STAG).gather(1, state.prey_position.long())
    from_stag = from_stag.masked_fill(~state.prey_alive | (env.hunt_action == HUNT_STAG), -1)
    farthest = from_stag == from_stag.amax(1, keepdim=True)
    return hunter_probs(env, state._replace(prey_alive=state.prey_alive & farthest), legal, HUNT_HARE)


def wanderer_probs(env, state, legal):
    hunts = legal & (env.action >= HUNT_STAG)
    choices = torch.where(hunts.any(-1, keepdim=True), hunts, legal)
    return choices / choices.sum(-1, keepdim=True)


KINDS = {
    "slow_stag": slow_stag_probs,
    "gives_up": gives_up_probs,
    "cautious": cautious_probs,
    "contrarian": contrarian_probs,
    "far_hare": far_hare_probs,
    "wanderer": wanderer_probs,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    PLAYER_PROBS.update(KINDS)
    seats = tuple(f"learner,{kind},{kind},{kind}" for kind in KINDS)
    adapt.main(tyro.cli(adapt.Args, default=adapt.Args(seats=seats)))
