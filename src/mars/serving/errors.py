"""What can go wrong with a request besides what it asks for."""

import traceback

from mars.errors import UserError


class EngineFull(UserError):
    """The engine has as many requests as it takes; try again later."""


class EngineClosed(UserError):
    """The engine takes no requests any more."""


class ForwardError(RuntimeError):
    """A forward of the model has failed, and with it all requests that ran: see `__cause__`."""


def without_frames(error: Exception) -> Exception:
    """Put the traceback of an error into a note (in place).

    Its frames would hold on to logits and caches for as long as somebody keeps the error.
    """
    error.add_note("In the engine:\n" + "".join(traceback.format_exception(error)))
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is not None and link.__traceback__ is not None:
            link.__traceback__ = None
            chain += link.__cause__, link.__context__
    return error
