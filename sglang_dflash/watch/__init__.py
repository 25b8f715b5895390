"""Watch a DFLASH server draft: a page for a browser, and a chat for a terminal."""
