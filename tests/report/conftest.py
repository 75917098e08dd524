"""Pages of the report are opened in one browser for each file of tests."""

from browser_pages import browser, open_page

__all__ = ["browser", "open_page"]
