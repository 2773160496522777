"""Random faults over several jobs on this machine's cluster: do all complete, and is anything left behind?"""
