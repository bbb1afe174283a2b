"""Warnings of the core are Python's, at the line of the program."""

from __future__ import annotations

import warnings

import pytest

from tessera._warnings import caught_warnings, warn_user


def test_a_warning_names_the_line_that_called_the_package() -> None:
    with pytest.warns(UserWarning) as caught:
        warn_user(["first", "second"])
    assert [(str(w.message), w.filename) for w in caught] == [("first", __file__), ("second", __file__)]


def test_what_is_caught_is_not_shown_and_an_error_passes() -> None:
    taken: list[list[str]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError), caught_warnings(taken.append):
            raise KeyError
    assert taken == [[]]
