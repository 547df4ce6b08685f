"""``at="backward"``: after ``backward()`` the consequentialist gradient of that very pass is in ``.grad``."""
