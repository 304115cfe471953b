"""Pictures are written completely, and the same figure gives the same file."""

import pytest
from matplotlib.figure import Figure
from PIL import Image

from raymm.draw.save import DPI, new_figure, picture_path, save_figure, text_width


def figure(colour="#112233"):
    made = new_figure(1.0, 0.5)
    made.patch.set_facecolor(colour)
    return made


def test_a_picture_has_its_size_and_exact_flat_colours(tmp_path):
    path = save_figure(figure(), tmp_path / "new" / "a.PNG")
    with Image.open(path) as image:
        assert image.size == (DPI, DPI // 2)
        assert image.convert("RGB").getpixel((5, 5)) == (0x11, 0x22, 0x33)
    assert path.stat().st_mode & 0o777 == 0o644


def test_the_same_figure_gives_the_same_png(tmp_path):
    paths = [save_figure(figure(), tmp_path / name) for name in ("a.png", "b.png")]
    other = save_figure(figure("red"), tmp_path / "c.png")
    assert paths[0].read_bytes() == paths[1].read_bytes() != other.read_bytes()


@pytest.mark.parametrize("name", ["a.pdf", "a", "png", ".png", "a.png.txt"])
def test_other_suffixes_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"picture '{name}': the name must end in .png or .svg"):
        picture_path(name)


def test_the_width_of_a_text_is_that_of_its_widest_line():
    made: Figure = figure()
    one = text_width(made, "wide line", 10)
    assert text_width(made, "wide line\na", 10) == pytest.approx(one) and not made.texts
    assert text_width(made, "wide line", 20) == pytest.approx(2 * one, rel=0.05)
