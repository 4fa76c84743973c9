"""What the server starts and signals: runs, jobs, chats and workers, each a process of its own."""
