"""Sources that exported heads are put together from: they import torch and transformers alone."""
