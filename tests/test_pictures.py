"""What the pictures show: who is where, who hunts, what has changed."""

import stag_hunt_env
from stag_hunt_env import CELL, StagHuntConfig, StagHuntEnv, State, render_ansi, render_rgb

import numpy as np
import torch
from helpers import start_script
from PIL import Image

CONFIG = StagHuntConfig(height=3, width=4, num_players=8, num_stags=1, num_hares=2)


def picture(env, state, returns=None, **options):
    returns = torch.zeros(len(state.time), env.config.num_players) if returns is None else returns
    return render_rgb(env, state, returns, **options)


def cells_that_differ(config, ours, other):
    """{cell: ...} of the board, and whether anything below it differs"""
    board = config.height * CELL
    different = (ours != other).any(2)
    blocks = different[:board].reshape(config.height, CELL, -1, CELL)[:, :, : config.width].any((1, 3))
    return set(np.flatnonzero(blocks).tolist()), bool(different[board:].any())


def test_hunters_get_a_ring():
    env = StagHuntEnv(CONFIG, seed=1)
    actions = torch.tensor([0, 1, 2, 3, 4, 5, 6, 4])
    plain = picture(env, env.state)
    cells = set(env.state.position[0, 5:7].tolist())
    assert cells_that_differ(CONFIG, plain, picture(env, env.state, hunting=actions)) == (cells, False)
    assert np.array_equal(plain, picture(env, env.state, hunting=torch.full((8,), 4)))


def test_pictures_show_what_changed():
    config = StagHuntConfig(height=4, width=6, max_wall_pieces=1)
    env = StagHuntEnv(config, 4, seed=7)
    state = env.state
    before = picture(env, state)
    legal = env.legal_actions(state)
    moved, *_ = env.transition(state, torch.where(legal[..., :4].any(-1), legal.int().argmax(-1), 4))
    changes = {
        "a move": moved._replace(time=state.time),
        "a player that left": state._replace(present=state.present & (torch.arange(4) != 2)),
        "a caught stag": state._replace(prey_alive=state.prey_alive & (torch.arange(5) != 0)),
        "a caught hare": state._replace(prey_alive=state.prey_alive & (torch.arange(5) != 4)),
        "walls": state._replace(walls=1 - state.walls),
    }
    for what, other in changes.items():
        cells, _ = cells_that_differ(config, before, picture(env, other))
        assert cells, what
    later = picture(env, state._replace(time=state.time + 20))
    richer = picture(env, state, torch.ones(4, 4))
    named = picture(env, state, names=["A", "B", "C", "D"])
    for other in (later, richer, named):
        assert cells_that_differ(config, before, other) == (set(), True)
    assert not np.array_equal(before, picture(env, State(*(x[1:] for x in state))))


def test_ansi_shows_everyone_and_all_prey():
    config = StagHuntConfig(height=5, width=6, num_players=8, num_stags=2, num_hares=3, max_wall_pieces=1)
    env, walls = StagHuntEnv(config, 20, seed=6), 0
    crowd = env.state.position.clone()
    crowd[0] = crowd[0, 0]
    state = env.state._replace(position=crowd, present=torch.rand(20, 8, generator=env.generator) < 0.8)
    state = state._replace(prey_alive=torch.rand(20, 5, generator=env.generator) < 0.6)
    for game in range(20):
        one = State(*(x[game : game + 1] for x in state))
        *rows, below = render_ansi(env, one, torch.zeros(1, 8)).splitlines()
        board = "\n".join(rows)
        assert below.startswith("t=0/35") and len({len(row) for row in rows}) == 1, "a crooked frame"
        assert [board.count(str(i)) for i in range(8)] == one.present[0].int().tolist()
        assert board.count("S") == one.prey_alive[0, :2].sum()
        assert board.count("h") == one.prey_alive[0, 2:].sum()
        assert board.count("#") == one.walls.sum()
        walls += board.count("#")
        for i in one.present[0].nonzero().flatten().tolist():
            row, column = divmod(int(one.position[0, i]), 6)
            assert str(i) in rows[row].strip("|").split("|")[column]
    assert walls


def test_the_script_shows_another_game_for_another_seed(tmp_path, capsys):
    def shown(seed, *flags):
        start_script(stag_hunt_env, "--seed", seed, "--height", "5", "--final-time", "3", *flags)
        return capsys.readouterr().out

    first = shown(3, "--gif", tmp_path / "a.gif")
    boards = first.split("t=0/3")[0]
    assert boards.count("|\n") == 5 and all(mark in boards for mark in "0123Sh")
    assert shown(3) == first
    assert shown(4).split("t=0/3")[0].splitlines()[1:] != boards.splitlines()[1:]
    with Image.open(tmp_path / "a.gif") as gif:
        assert gif.n_frames == first.count("t=")
