"""The page that shows blocks while they are drafted and verified."""
