"""The report as one HTML page: templates, style and script, filled by `document.py`."""
