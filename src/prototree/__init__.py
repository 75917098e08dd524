"""Neural prototype trees: image classifiers that can be read in full.

>>> import prototree
>>> run = prototree.fit("photos/", "runs/photos")
>>> prototree.predict(run, "bird.jpg").prediction
>>> [prediction.predicted_class for prediction in prototree.predict(run, "holiday/")]

Public names are imported in `__init__.pyi` and load on first use (Scientific Python SPEC 1).
"""

import lazy_loader

from prototree._version import __version__ as __version__

__getattr__, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = list(_names)
