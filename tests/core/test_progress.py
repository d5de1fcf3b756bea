"""One mechanism reports progress: a callback, a bar, or nothing."""

from gepc.core.progress import reporting


def test_a_callback_is_used_as_it_is():
    seen: list[int] = []
    with reporting(seen.append, "work", 3) as advance:
        advance(2)
    assert seen == [2]


def test_a_bar_and_silence_take_any_number_of_images(capfd):
    for wanted in (True, False, None):
        with reporting(wanted, "work", None) as advance:
            advance(5)
    assert capfd.readouterr().out == ""
