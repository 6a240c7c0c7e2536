/* In a guest, by its host's order: net_io HOST PORT out|in|echo COUNT makes COUNT connections, a process each, and sends without end,
   takes without end, or gives back each byte at once. It ends with its connections. */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static char piece[1 << 18];

static int connected(const char *host, const char *port) {
  struct sockaddr_in there = {.sin_family = AF_INET, .sin_port = htons(atoi(port))};
  int at = socket(AF_INET, SOCK_STREAM, 0), on = 1;
  if (at < 0 || inet_pton(AF_INET, host, &there.sin_addr) != 1) return -1;
  if (connect(at, (struct sockaddr *)&there, sizeof there) != 0) return -1;
  setsockopt(at, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return at;
}

static void serve(int at, const char *way) {
  if (!strcmp(way, "out"))
    while (write(at, piece, sizeof piece) > 0) continue;
  else if (!strcmp(way, "in"))
    while (read(at, piece, sizeof piece) > 0) continue;
  else
    for (ssize_t got; (got = read(at, piece, sizeof piece)) > 0;)
      if (write(at, piece, got) != got) break;
}

int main(int count, char **words) {
  if (count != 5) return 2;
  for (int left = atoi(words[4]); left > 0; left--)
    if (fork() == 0) {
      int at = connected(words[1], words[2]);
      if (at < 0) return 1;
      serve(at, words[3]);
      return 0;
    }
  while (wait(NULL) > 0) continue;
  return 0;
}
