"""What the cluster holds, kept in caches fed by watches. Reads only."""
