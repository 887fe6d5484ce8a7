"""The page at `/`: its files, and the figures its status view shows."""
