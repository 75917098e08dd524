"""Every error a user can cause. Each message says what was expected, what was found, and what to do."""


class ProtoTreeError(Exception):
    """Base class of all errors that this package raises on purpose; others are bugs.

    Its subclasses are in `prototree.errors`, such as `ConfigError`, `DataError` and `CheckpointError`. Every message
    says what was expected, what was found and what to do.

    Examples:
        >>> try:
        ...     prototree.fit("nowhere/", "runs/x")
        ... except prototree.ProtoTreeError as error:
        ...     print(error)
        nowhere does not exist; expected a folder of images or a CSV file that lists them
    """


class ConfigError(ProtoTreeError):
    """A setting that is unknown or out of range."""


class ImageSizeError(ConfigError):
    """Images far larger than a network was made for."""


class DataError(ProtoTreeError):
    """Images, labels or annotation files that cannot be used."""


class TooLargeError(DataError):
    """An image of more pixels or bytes than we take."""


class NotAnImageError(DataError):
    """A file that holds no image, or none of a kind we read."""


class ShapeError(ProtoTreeError):
    """Tensors whose shapes or values do not fit the tree."""


class WeightsError(ProtoTreeError):
    """A backbone's weight file that is missing, damaged or of another model."""


class CheckpointError(ProtoTreeError):
    """A saved tree or run that is damaged, of another version, or not one."""


class PruneError(ProtoTreeError):
    """A threshold that leaves nothing."""


class TrainError(ProtoTreeError):
    """Training that cannot start or go on."""


class EditError(ProtoTreeError):
    """An edit of a tree by hand that cannot be made."""


class ConflictError(EditError):
    """An edit of a state that somebody else has changed meanwhile."""


class MissingExtraError(ProtoTreeError):
    """An optional package that is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"this needs the package {package!r}, which is not installed; {how_to_install(extra)}")


def how_to_install(extra: str) -> str:
    """Words on how to install what an extra holds, from a clone or from an index."""
    return f"install it with: pip install '.[{extra}]' in a clone, or pip install 'prototree[{extra}]' from an index"
