/* A QEMU that its guest took over: loaded into the real one (LD_PRELOAD), it waits in a thread for a list of things to try, tries
 * them from inside, and tells on standard error what became of each:
 *
 *     TRIED <what> <argument>: got | refused <errno> | <number>
 *
 * The list is the file `list` beside this library, one "<vm> <what> <argument>" a line; <vm> is part of the VM's name, so that
 * each QEMU takes only its own lines. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/if_packet.h>
#include <linux/keyctl.h>
#include <linux/netlink.h>
#include <linux/vm_sockets.h>
#include <netinet/in.h>
#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <sys/un.h>
#include <unistd.h>

static char own_name[8192];

static long check(long result) { return result < 0 ? -errno : result; }

static long opened(const char *path, int flags)
{
    int fd = open(path, flags | O_CLOEXEC | O_NONBLOCK, 0600);
    if (fd < 0)
        return -errno;
    char byte;
    long read_one = (flags & O_ACCMODE) == O_RDONLY && !(flags & O_DIRECTORY) ? check(read(fd, &byte, 1)) : 0;
    close(fd);
    return read_one == -EAGAIN || read_one == -EINVAL ? 0 : read_one;
}

static long written(const char *path) { return opened(path, O_WRONLY | O_APPEND); }
static long read_from(const char *path) { return opened(path, O_RDONLY); }

static long listed(const char *path)
{
    DIR *directory = opendir(path);
    if (!directory)
        return -errno;
    closedir(directory);
    return 0;
}

static long created(const char *path)
{
    long result = opened(path, O_WRONLY | O_CREAT | O_EXCL);
    if (result >= 0)
        unlink(path);
    return result;
}

static long connected_as(const char *path, int type, int is_abstract)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path + is_abstract, path, sizeof address.sun_path - 1 - is_abstract);
    socklen_t size = offsetof(struct sockaddr_un, sun_path) + is_abstract + strlen(path) + !is_abstract;
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    long result = check(connect(fd, (struct sockaddr *)&address, size));
    close(fd);
    return result;
}

static long connected(const char *path)
{
    long result = -EPROTOTYPE;
    const int types[] = {SOCK_STREAM, SOCK_SEQPACKET, SOCK_DGRAM};
    for (int i = 0; i < 3; i++) {
        long one = connected_as(path, types[i], 0);
        if (one >= 0)
            return one;
        if (one != -EPROTOTYPE)
            result = one;
    }
    return result;
}

static long abstract(const char *name) { return connected_as(name, SOCK_STREAM, 1); }

/* fetch SOCKET REQUEST: the request is the whole JSON frame. */
static long fetched(const char *arguments)
{
    char path[PATH_MAX];
    int end = 0;
    sscanf(arguments, "%4095s %n", path, &end);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    char answer[4096] = "", rights[512];
    struct iovec room = {answer, sizeof answer - 1};
    struct msghdr message = {.msg_iov = &room, .msg_iovlen = 1, .msg_control = rights, .msg_controllen = sizeof rights};
    long result = check(connect(fd, (struct sockaddr *)&address, sizeof address));
    if (result >= 0)
        result = check(send(fd, arguments + end, strlen(arguments + end), MSG_NOSIGNAL));
    if (result >= 0)
        result = check(recvmsg(fd, &message, MSG_CMSG_CLOEXEC));
    close(fd);
    if (result < 0)
        return result;
    if (CMSG_FIRSTHDR(&message))
        return 0;
    return -EACCES; /* answered, without a descriptor */
}

static long signalled(const char *pid) { return check(kill(atoi(pid), 0)); }
static long stopped_by_pidfd(const char *pid)
{
    long fd = syscall(SYS_pidfd_open, atoi(pid), 0);
    if (fd < 0)
        return -errno;
    long result = check(syscall(SYS_pidfd_send_signal, fd, 0, NULL, 0));
    close(fd);
    return result;
}
static long traced(const char *pid) { return check(ptrace(PTRACE_SEIZE, atoi(pid), NULL, NULL)); }
static long memory_read(const char *arguments)
{
    int pid;
    unsigned long address;
    char byte;
    sscanf(arguments, "%d %lx", &pid, &address);
    struct iovec here = {&byte, 1}, there = {(void *)address, 1};
    return check(process_vm_readv(pid, &here, 1, &there, 1, 0));
}
static long keyed(const char *unused) { (void)unused; return check(syscall(SYS_keyctl, KEYCTL_GET_KEYRING_ID, KEY_SPEC_USER_KEYRING, 1)); }

static long dialled(const char *arguments, int type)
{
    char host[64];
    int port;
    sscanf(arguments, "%63s %d", host, &port);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    inet_pton(AF_INET, host, &address.sin_addr);
    int fd = socket(AF_INET, type | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    struct timeval patience = {1, 0};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    long result = check(connect(fd, (struct sockaddr *)&address, sizeof address));
    if (result >= 0 && type == SOCK_DGRAM)
        result = check(send(fd, "x", 1, 0));
    close(fd);
    return result;
}
static long tcp(const char *arguments) { return dialled(arguments, SOCK_STREAM); }
static long udp(const char *arguments) { return dialled(arguments, SOCK_DGRAM); }
static long family(const char *arguments)
{
    int number, type;
    sscanf(arguments, "%d %d", &number, &type);
    int fd = socket(number, type, 0);
    if (fd < 0)
        return -errno;
    close(fd);
    return 0;
}

/* A shell command, since no code of ours is left to tell if it works. */
static long executed(const char *command)
{
    char *words[] = {"sh", "-c", (char *)command, NULL}, *none[] = {NULL};
    return check(execve("/bin/sh", words, none));
}
static long unshared(const char *unused) { (void)unused; return check(unshare(CLONE_NEWUSER | CLONE_NEWNET)); }
static long ring(const char *unused) { (void)unused; char room[256] = {0}; return check(syscall(SYS_io_uring_setup, 1, room)); }
static long ended(const char *unused) { (void)unused; return 0; }
static long changed_mode(const char *path) { return check(chmod(path, 0777)); }
static long core_limit(const char *unused)
{
    (void)unused;
    struct rlimit limit;
    getrlimit(RLIMIT_CORE, &limit);
    return limit.rlim_max > INT_MAX ? INT_MAX : (long)limit.rlim_max;
}

/* MiB that its output takes at once. */
static long filled(const char *most)
{
    static char page[1 << 16];
    long taken = 0, full = 0;
    memset(page, '#', sizeof page - 1);
    page[sizeof page - 1] = '\n';
    while (!full && taken < atol(most) << 20) {
        full = 1;
        for (int fd = 1; fd <= 2; fd++) {
            ssize_t one = write(fd, page, sizeof page);
            if (one > 0)
                taken += one, full = 0;
        }
    }
    return taken >> 20;
}

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static void *wait_at_gate(void *unused) { pthread_mutex_lock(&gate); pthread_mutex_unlock(&gate); return unused; }
/* How many threads can be had, up to the number asked for. */
static long threads(const char *most)
{
    int wanted = atoi(most), made = 0;
    pthread_t *all = calloc(wanted, sizeof *all);
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, PTHREAD_STACK_MIN);
    pthread_mutex_lock(&gate);
    while (made < wanted && pthread_create(&all[made], &small, wait_at_gate, NULL) == 0)
        made++;
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < made; i++)
        pthread_join(all[i], NULL);
    free(all);
    return made;
}

static const struct {
    const char *name;
    long (*run)(const char *);
} attempts[] = {
    {"read", read_from}, {"write", written}, {"list", listed}, {"create", created}, {"chmod", changed_mode},
    {"connect", connected}, {"abstract", abstract}, {"fetch", fetched},
    {"signal", signalled}, {"pidfd", stopped_by_pidfd}, {"ptrace", traced}, {"memory", memory_read}, {"keyring", keyed},
    {"tcp", tcp}, {"udp", udp}, {"family", family},
    {"exec", executed}, {"unshare", unshared}, {"io_uring", ring},
    {"end", ended}, {"core", core_limit}, {"threads", threads}, {"fill", filled},
};

struct attempt { long (*run)(const char *); const char *argument; long result; };

static void *in_a_thread(void *one)
{
    struct attempt *now = one;
    now->result = now->run(now->argument);
    return NULL;
}

/* A filter may end the thread that tries, which nobody is told of. */
static long result_of(struct attempt *now)
{
    pthread_t thread;
    struct timespec limit;
    if (pthread_create(&thread, NULL, in_a_thread, now))
        return -EAGAIN;
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += 20;
    return pthread_timedjoin_np(thread, NULL, &limit) ? -ETIME : now->result;
}

/* Waits for room: what it tells is not to be lost among what it fills its output with. */
static void tell(const char *what, const char *argument, const char *how)
{
    char line[8500];
    struct pollfd room = {.fd = 2, .events = POLLOUT};
    int size = snprintf(line, sizeof line, "\nTRIED %s %s: %s\n", what, argument, how);
    while (write(2, line, size) < 0 && errno == EAGAIN)
        poll(&room, 1, 1000);
}

static void attempt(const char *what, const char *argument)
{
    for (size_t i = 0; i < sizeof attempts / sizeof *attempts; i++) {
        if (strcmp(attempts[i].name, what))
            continue;
        static struct attempt now; /* outlives a thread that hangs */
        now = (struct attempt){attempts[i].run, argument, -ENOTRECOVERABLE}; /* what is left of a thread that a filter killed */
        long result = result_of(&now);
        char number[32];
        if (result < 0)
            snprintf(number, sizeof number, "refused %s", strerrorname_np(-result));
        else
            snprintf(number, sizeof number, "%ld", result);
        tell(what, argument, result ? number : "got");
    }
}

static void *take_over(void *list)
{
    char line[8192], vm[256], what[64];
    FILE *file;
    for (;;) {
        usleep(50000);
        if ((file = fopen(list, "re")) == NULL)
            continue;
        int ours = 0;
        while (fgets(line, sizeof line, file)) {
            int at = 0;
            line[strcspn(line, "\n")] = 0;
            if (sscanf(line, "%255s %63s %n", vm, what, &at) < 2 || !strstr(own_name, vm))
                continue;
            ours = 1;
            attempt(what, line + at);
        }
        fclose(file);
        if (ours)
            return NULL;
    }
}

__attribute__((constructor)) static void loaded(void)
{
    static char list[PATH_MAX];
    const char *library = getenv("LD_PRELOAD");
    FILE *file = fopen("/proc/self/cmdline", "re");
    size_t size = file ? fread(own_name, 1, sizeof own_name - 1, file) : 0;
    for (size_t i = 0; i < size; i++)
        if (!own_name[i])
            own_name[i] = ' ';
    if (file)
        fclose(file);
    if (!library || !strstr(own_name, "guest=virtshim-"))
        return; /* libvirt only asks what QEMU can do */
    snprintf(list, sizeof list, "%.*s/list", (int)(strrchr(library, '/') - library), library);
    pthread_t thread;
    pthread_create(&thread, NULL, take_over, list);
}
