"""Release of models after an interrupted step."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from raymm.errors import InputError

Method = TypeVar("Method", bound=Callable[..., Any])


def holds_nothing_when_interrupted(method: Method) -> Method:
    """Wrap a method so that the traceback of an interruption or of a wrong input does not hold its
    object.

    An interactive session keeps the last error with all frames and their arguments. Without this,
    ranks would outlive the variable of their model.
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
