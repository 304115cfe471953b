"""What holds a model whose step was interrupted: nothing but the names that are bound to it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from raymm.errors import InputError

Method = TypeVar("Method", bound=Callable[..., Any])


def holds_nothing_when_interrupted(method: Method) -> Method:
    """A method whose object is not held by the traceback of an interruption, or of a wrong input.

    An interactive session keeps the last error with all of its frames, and these what they are
    called with: ranks would outlive the name that they had.
    """

    @wraps(method)
    def called(*args: Any, **options: Any) -> Any:
        try:
            return method(*args, **options)
        except (KeyboardInterrupt, InputError) as error:
            traceback.clear_frames(error.__traceback__)
            del args, options
            raise

    return cast(Method, called)
