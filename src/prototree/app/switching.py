"""The run that is open can change while the app runs: after learning, the new one takes the old one's place."""

from typing import Any

from prototree.app.schemas import FinetuneStatus
from prototree.app.service import Service
from prototree.editing.session import open_session
from prototree.errors import EditError

_OWN = ("_now", "open_learned", "__class__")


class Switch(Service):
    """Stands where a service stands and passes everything on to the one of the run that is open now.

    A request takes its method from one service and stays with it, so that none sees half of a change.
    """

    def __init__(self, service: Service) -> None:
        self._now = service

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name in _OWN else getattr(self._now, name)

    def open_learned(self) -> FinetuneStatus:
        """Opens the newly trained run; pages of the old one notice by the revision."""
        old = self._now
        status = old.learner.status()
        if status.state == "opened":  # somebody else was faster
            return status
        if status.state != "done":
            raise EditError("there is no new run to open yet; wait until the network has learned")
        session = open_session(old.learner.out, data=old.session.source)
        session.continue_from(old.revision + 1)
        opened = status.model_copy(update={"state": "opened"})
        self._now = Service(session, old.results, opened)
        return opened
