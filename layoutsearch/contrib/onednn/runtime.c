/* Convolutions by oneDNN on the threads of TVM's pool.
 *
 * Linked into every library that holds such a kernel. A kernel calls `layoutsearch_onednn_conv` with a text that says
 * what to compute, and pointers.
 *
 * oneDNN's wheel does its parallel loops by libgomp, whose threads would fight TVM's spinning pool for the cores. So the
 * part of libgomp's interface that oneDNN uses is implemented here, and found first by the dynamic linker: a convolution
 * is one launch of TVM's pool, in which task 0 calls oneDNN and the others wait for the parallel regions that it opens.
 * Where oneDNN is bound to the real libgomp already (something else in the process loaded it before), everything works
 * all the same, on that library's threads.
 */
#define _GNU_SOURCE
#include <oneapi/dnnl/dnnl.h>
#include <oneapi/dnnl/dnnl_debug.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- What is used of TVM's C interface ---- */

typedef struct {
  void *sync;
  int32_t num_task;
} GroupEnv;

typedef int (*Lambda)(int task, GroupEnv *env, void *data);
extern int TVMBackendParallelLaunch(Lambda lambda, void *data, int tasks) __attribute__((weak));

/* ---- The threads of one convolution, as libgomp's callers see them ---- */

typedef struct {
  void (*function)(void *);
  void *data;
  int threads;           /* of the region that is open */
  int size;              /* of the team, task 0 included */
  _Atomic int posted;    /* regions opened so far */
  _Atomic int pending;   /* members that have not finished the last one */
  _Atomic int arrived;   /* at a barrier */
  _Atomic int barriers;  /* passed so far */
  _Atomic int closed;
} Team;

typedef struct {
  Team *team; /* NULL: alone */
  int id, threads, depth, limit;
  long next, end, step, chunk; /* of a statically shared loop */
} Member;

/* One for the process, whatever number of libraries holds this file: oneDNN is bound to the functions of one of them. */
struct Shared {
  _Atomic int state;
  _Atomic int bound; /* whether oneDNN calls the functions below */
  pthread_key_t key;
};
extern struct Shared layoutsearch_onednn_shared_1;
__asm__(
    ".pushsection .bss.layoutsearch_onednn,\"aw\",@nobits\n"
    ".globl layoutsearch_onednn_shared_1\n"
    ".type layoutsearch_onednn_shared_1, @gnu_unique_object\n"
    ".size layoutsearch_onednn_shared_1, 64\n"
    ".balign 64\n"
    "layoutsearch_onednn_shared_1:\n"
    ".zero 64\n"
    ".popsection\n");
#define SHARED layoutsearch_onednn_shared_1

static pthread_key_t key_of_process(void) {
  int expected = 0;
  if (atomic_compare_exchange_strong(&SHARED.state, &expected, 1)) {
    pthread_key_create(&SHARED.key, NULL);
    atomic_store(&SHARED.state, 2);
  }
  while (atomic_load(&SHARED.state) != 2) sched_yield();
  return SHARED.key;
}

static Member *self(void) { return (Member *)pthread_getspecific(key_of_process()); }

static void enter(Member *member) { pthread_setspecific(key_of_process(), member); }

/* Two threads may share a core for a while: who waits longer than a moment lets others run, as TVM's pool does. */
static inline void pause_briefly(int *spins) {
  if (*spins < 100) {
    ++*spins;
    __builtin_ia32_pause();
  } else {
    sched_yield();
  }
}

int omp_get_max_threads(void) {
  Member *m = self();
  atomic_store_explicit(&SHARED.bound, 1, memory_order_relaxed);
  return m != NULL ? m->limit : 1;
}

int omp_get_num_threads(void) {
  Member *m = self();
  return m != NULL ? m->threads : 1;
}

int omp_get_thread_num(void) {
  Member *m = self();
  return m != NULL && m->depth == 1 ? m->id : 0;
}

int omp_in_parallel(void) {
  Member *m = self();
  return m != NULL && m->depth > 0 && m->threads > 1;
}

void GOMP_parallel_start(void (*function)(void *), void *data, unsigned wanted) {
  Member *m = self();
  if (m == NULL) return;
  if (++m->depth > 1) return; /* a region within a region is the caller's alone */
  int threads = wanted == 0 || (int)wanted > m->limit ? m->limit : (int)wanted;
  m->threads = m->team != NULL ? threads : 1;
  if (m->threads > 1) {
    Team *t = m->team;
    t->function = function;
    t->data = data;
    t->threads = threads;
    atomic_store_explicit(&t->pending, t->size - 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&t->posted, 1, memory_order_release);
  }
}

void GOMP_parallel_end(void) {
  Member *m = self();
  if (m == NULL || --m->depth > 0) return;
  int spins = 0;
  if (m->threads > 1)
    while (atomic_load_explicit(&m->team->pending, memory_order_acquire) > 0) pause_briefly(&spins);
  m->threads = 1;
}

void GOMP_barrier(void) {
  Member *m = self();
  if (m == NULL || m->depth != 1 || m->threads < 2) return;
  Team *t = m->team;
  int passed = atomic_load(&t->barriers), spins = 0;
  if (atomic_fetch_add(&t->arrived, 1) + 1 == m->threads) {
    atomic_store(&t->arrived, 0);
    atomic_fetch_add(&t->barriers, 1);
  } else {
    while (atomic_load(&t->barriers) == passed) pause_briefly(&spins);
  }
}

/* `for (i = start; i < end (or > for a negative step); i += step)` by even shares, or by chunks in turn. */
bool GOMP_loop_static_next(long *first, long *last) {
  Member *m = self();
  if (m == NULL || m->chunk == 0) return false;
  bool up = m->step > 0;
  if (up ? m->next >= m->end : m->next <= m->end) return false;
  long stop = m->next + m->chunk * m->step;
  *first = m->next;
  *last = (up ? stop > m->end : stop < m->end) ? m->end : stop;
  m->next += m->chunk * m->step * m->threads;
  return true;
}

bool GOMP_loop_static_start(long start, long end, long step, long chunk, long *first, long *last) {
  Member *m = self();
  int id = omp_get_thread_num(), threads = m != NULL && m->depth == 1 ? m->threads : 1;
  long total = (end - start + step - (step > 0 ? 1 : -1)) / step;
  if (total < 0) total = 0;
  if (m == NULL || m->depth != 1 || chunk == 0) {
    long share = total / threads, rest = total % threads;
    long from = id * share + (id < rest ? id : rest), size = share + (id < rest);
    if (m != NULL) m->chunk = 0;
    *first = start + from * step;
    *last = start + (from + size) * step;
    return size > 0;
  }
  m->next = start + id * chunk * step;
  m->end = end;
  m->step = step;
  m->chunk = chunk;
  return GOMP_loop_static_next(first, last);
}

void GOMP_loop_end_nowait(void) {}

/* What the other tasks of the launch do: run their part of every region until the team is closed. */
static void serve(Team *t, int id) {
  Member me = {t, id, 1, 0, 1, 0, 0, 0, 0};
  int seen = 0, spins = 0;
  enter(&me);
  for (;;) {
    if (atomic_load_explicit(&t->posted, memory_order_acquire) != seen) {
      seen++;
      if (id < t->threads) {
        me.threads = t->threads;
        me.limit = t->threads;
        me.depth = 1;
        t->function(t->data);
        me.depth = 0;
      }
      atomic_fetch_sub_explicit(&t->pending, 1, memory_order_release);
      spins = 0;
    } else if (atomic_load_explicit(&t->closed, memory_order_acquire)) {
      break;
    } else {
      pause_briefly(&spins);
    }
  }
  enter(NULL);
}

/* ---- What to compute ---- */

#define MAX_POST 16
#define MAX_POINTERS 8
#define MESSAGE 256

typedef struct {
  long n, ic, ih, iw, oc, oh, ow, kh, kw, sh, sw, pt, pl, pb, pr, dh, dw, groups;
  char src[32], weights[80], dst[32];
  char *given; /* layout of the weights that are passed, where they are packed in every call; within `weights` */
  int bias;
  int posts;
  struct {
    dnnl_alg_kind_t kind;
    float alpha, beta;
    char operand; /* of a binary operation: f(ull), c(hannels), s(calar); 0 of others */
    int sum;      /* added by having it in the result beforehand */
  } post[MAX_POST];
} Spec;

static const struct {
  const char *name;
  dnnl_alg_kind_t kind;
} KINDS[] = {
    {"relu", dnnl_eltwise_relu},         {"clip", dnnl_eltwise_clip},       {"linear", dnnl_eltwise_linear},
    {"logistic", dnnl_eltwise_logistic}, {"tanh", dnnl_eltwise_tanh},       {"swish", dnnl_eltwise_swish},
    {"exp", dnnl_eltwise_exp},           {"abs", dnnl_eltwise_abs},         {"sqrt", dnnl_eltwise_sqrt},
    {"hardswish", dnnl_eltwise_hardswish}, {"add", dnnl_binary_add},        {"mul", dnnl_binary_mul},
    {"sub", dnnl_binary_sub},            {"div", dnnl_binary_div},          {"max", dnnl_binary_max},
    {"min", dnnl_binary_min},
};

static int parse(const char *text, Spec *s, char *error) {
  long *sizes[] = {&s->n,  &s->ic, &s->ih, &s->iw, &s->oc, &s->oh, &s->ow, &s->kh, &s->kw,
                   &s->sh, &s->sw, &s->pt, &s->pl, &s->pb, &s->pr, &s->dh, &s->dw, &s->groups};
  int at = 0;
  memset(s, 0, sizeof *s);
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    int used = 0;
    if (sscanf(text + at, "%ld%n", sizes[i], &used) != 1) goto bad;
    at += used;
  }
  int used = 0;
  if (sscanf(text + at, "%31s %79s %31s %d%n", s->src, s->weights, s->dst, &s->bias, &used) != 4) goto bad;
  at += used;
  s->given = strchr(s->weights, '<');
  if (s->given != NULL) *s->given++ = 0;
  char word[64];
  while (sscanf(text + at, "%63s%n", word, &used) == 1) {
    at += used;
    if (s->posts == MAX_POST) goto bad;
    char *colon = strchr(word, ':');
    if (colon != NULL) *colon++ = 0;
    if (!strcmp(word, "sum")) {
      s->post[s->posts].operand = 'f';
      s->post[s->posts++].sum = 1;
      continue;
    }
    size_t k = 0, count = sizeof KINDS / sizeof *KINDS;
    while (k < count && strcmp(KINDS[k].name, word)) k++;
    if (k == count) goto bad;
    s->post[s->posts].kind = KINDS[k].kind;
    if (colon != NULL && strchr("fcs", *colon) != NULL)
      s->post[s->posts].operand = *colon;
    else if (colon != NULL)
      sscanf(colon, "%f:%f", &s->post[s->posts].alpha, &s->post[s->posts].beta);
    s->posts++;
  }
  return 0;
bad:
  snprintf(error, MESSAGE, "not a convolution that this version of layoutsearch knows: %.120s", text);
  return -1;
}

#define CHECK(call, what)                                                        \
  do {                                                                           \
    dnnl_status_t status_ = (call);                                              \
    if (status_ != dnnl_success) {                                               \
      snprintf(error, MESSAGE, "oneDNN: %s: %s", what, dnnl_status2str(status_)); \
      goto failed;                                                               \
    }                                                                            \
  } while (0)

static dnnl_engine_t engine(void) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static dnnl_engine_t one;
  pthread_mutex_lock(&lock);
  if (one == NULL && dnnl_engine_create(&one, dnnl_cpu, 0) != dnnl_success) one = NULL;
  pthread_mutex_unlock(&lock);
  return one;
}

static dnnl_format_tag_t tag_of(const char *name) {
  if (!strcmp(name, "any")) return dnnl_format_tag_any;
  for (int tag = dnnl_format_tag_any + 1; tag < dnnl_format_tag_last; tag++)
    if (!strcmp(dnnl_fmt_tag2str((dnnl_format_tag_t)tag), name)) return (dnnl_format_tag_t)tag;
  return dnnl_format_tag_undef;
}

/* Dimensions of the weights: (O, I, H, W), or (G, O / G, I / G, H, W). */
static int weight_dims(const Spec *s, dnnl_dims_t dims) {
  int d = 0;
  if (s->groups > 1) dims[d++] = s->groups;
  dims[d++] = s->oc / s->groups;
  dims[d++] = s->ic / s->groups;
  dims[d++] = s->kh;
  dims[d++] = s->kw;
  return d;
}

static dnnl_status_t describe_weights(const Spec *s, dnnl_format_tag_t tag, dnnl_memory_desc_t *md) {
  dnnl_dims_t dims;
  int ndims = weight_dims(s, dims);
  return dnnl_memory_desc_create_with_tag(md, ndims, dims, dnnl_f32, tag);
}

static int describe(const Spec *s, dnnl_primitive_desc_t *out, char *error) {
  dnnl_memory_desc_t src = NULL, weights = NULL, bias = NULL, dst = NULL, operand = NULL;
  dnnl_primitive_attr_t attr = NULL;
  dnnl_post_ops_t posts = NULL;
  int result = -1;
  dnnl_dims_t strides = {s->sh, s->sw}, dilates = {s->dh - 1, s->dw - 1}, begin = {s->pt, s->pl}, end = {s->pb, s->pr};
  CHECK(dnnl_memory_desc_create_with_tag(&src, 4, (dnnl_dims_t){s->n, s->ic, s->ih, s->iw}, dnnl_f32, tag_of(s->src)),
        "layout of the data");
  CHECK(describe_weights(s, tag_of(s->weights), &weights), "layout of the weights");
  CHECK(dnnl_memory_desc_create_with_tag(&dst, 4, (dnnl_dims_t){s->n, s->oc, s->oh, s->ow}, dnnl_f32, tag_of(s->dst)),
        "layout of the result");
  if (s->bias) CHECK(dnnl_memory_desc_create_with_tag(&bias, 1, (dnnl_dims_t){s->oc}, dnnl_f32, dnnl_a), "bias");
  CHECK(dnnl_primitive_attr_create(&attr), "attributes");
  CHECK(dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user), "scratchpad");
  CHECK(dnnl_post_ops_create(&posts), "post-ops");
  for (int i = 0; i < s->posts; i++) {
    if (s->post[i].sum) {
      CHECK(dnnl_post_ops_append_sum(posts, 1.0f, 0, dnnl_data_type_undef), "post-op");
      continue;
    }
    if (!s->post[i].operand) {
      CHECK(dnnl_post_ops_append_eltwise(posts, s->post[i].kind, s->post[i].alpha, s->post[i].beta), "post-op");
      continue;
    }
    dnnl_dims_t dims = {1, 1, 1, 1};
    if (s->post[i].operand != 's') dims[1] = s->oc;
    if (s->post[i].operand == 'f') {
      dims[0] = s->n;
      dims[2] = s->oh;
      dims[3] = s->ow;
    }
    dnnl_format_tag_t tag = s->post[i].operand == 'f' ? tag_of(s->dst) : dnnl_abcd;
    CHECK(dnnl_memory_desc_create_with_tag(&operand, 4, dims, dnnl_f32, tag), "operand");
    CHECK(dnnl_post_ops_append_binary(posts, s->post[i].kind, operand), "post-op");
    dnnl_memory_desc_destroy(operand);
    operand = NULL;
  }
  CHECK(dnnl_primitive_attr_set_post_ops(attr, posts), "post-ops");
  CHECK(dnnl_convolution_forward_primitive_desc_create(out, engine(), dnnl_forward_inference, dnnl_convolution_direct, src,
                                                       weights, bias, dst, strides, dilates, begin, end, attr),
        "convolution");
  result = 0;
failed:
  if (posts != NULL) dnnl_post_ops_destroy(posts);
  if (attr != NULL) dnnl_primitive_attr_destroy(attr);
  if (operand != NULL) dnnl_memory_desc_destroy(operand);
  if (src != NULL) dnnl_memory_desc_destroy(src);
  if (weights != NULL) dnnl_memory_desc_destroy(weights);
  if (bias != NULL) dnnl_memory_desc_destroy(bias);
  if (dst != NULL) dnnl_memory_desc_destroy(dst);
  return result;
}

/* ---- Convolutions that were made once ---- */

typedef struct Instance {
  struct Instance *next;
  const char *text;
  int threads;
  _Atomic int busy;
  dnnl_primitive_t primitive;
  dnnl_stream_t stream;
  void *scratch;
  int count, operands; /* of the arguments; those before the scratchpad have the caller's pointers */
  int sum;             /* number of the caller's operand that has to be in the result beforehand; 0 for none */
  size_t bytes;        /* of the result */
  dnnl_primitive_t repack; /* of the weights, in every call; NULL where they are packed */
  dnnl_memory_t plain, packed;
  dnnl_exec_arg_t args[MAX_POINTERS + 1];
} Instance;

static pthread_mutex_t instances_lock = PTHREAD_MUTEX_INITIALIZER;
#define BUCKETS 256
static Instance *instances[BUCKETS];

static int add_argument(Instance *one, int index, const_dnnl_memory_desc_t md, char *error) {
  CHECK(dnnl_memory_create(&one->args[one->count].memory, md, engine(), NULL), "memory");
  one->args[one->count++].arg = index;
  return 0;
failed:
  return -1;
}

static int make_repack(Instance *one, const Spec *s, char *error) {
  dnnl_memory_desc_t from = NULL, to = NULL;
  dnnl_primitive_desc_t pd = NULL;
  int result = -1;
  CHECK(describe_weights(s, tag_of(s->given), &from), "weights");
  CHECK(describe_weights(s, tag_of(s->weights), &to), "layout of the weights");
  CHECK(dnnl_reorder_primitive_desc_create(&pd, from, engine(), to, engine(), NULL), "reorder");
  CHECK(dnnl_primitive_create(&one->repack, pd), "reorder");
  CHECK(dnnl_memory_create(&one->plain, from, engine(), NULL), "memory");
  CHECK(dnnl_memory_create(&one->packed, to, engine(), DNNL_MEMORY_ALLOCATE), "memory");
  result = 0;
failed:
  if (pd != NULL) dnnl_primitive_desc_destroy(pd);
  if (from != NULL) dnnl_memory_desc_destroy(from);
  if (to != NULL) dnnl_memory_desc_destroy(to);
  return result;
}

static int make(Instance *one, char *error) {
  Spec s;
  dnnl_primitive_desc_t pd = NULL;
  int result = -1;
  if (parse(one->text, &s, error)) return -1;
  if (engine() == NULL) {
    snprintf(error, MESSAGE, "oneDNN has no engine for this CPU");
    return -1;
  }
  if (describe(&s, &pd, error)) return -1;
  CHECK(dnnl_primitive_create(&one->primitive, pd), "primitive");
  CHECK(dnnl_stream_create(&one->stream, engine(), dnnl_stream_default_flags), "stream");
  /* In the order of the kernel's operands. */
  if (add_argument(one, DNNL_ARG_SRC, dnnl_primitive_desc_query_md(pd, dnnl_query_src_md, 0), error)) goto failed;
  if (add_argument(one, DNNL_ARG_WEIGHTS, dnnl_primitive_desc_query_md(pd, dnnl_query_weights_md, 0), error))
    goto failed;
  if (s.bias &&
      add_argument(one, DNNL_ARG_BIAS, dnnl_primitive_desc_query_md(pd, dnnl_query_weights_md, 1), error))
    goto failed;
  for (int i = 0; i < s.posts; i++) {
    if (!s.post[i].operand) continue;
    if (s.post[i].sum) {
      one->sum = one->count;
      continue;
    }
    int index = DNNL_ARG_ATTR_MULTIPLE_POST_OP(i) | DNNL_ARG_SRC_1;
    if (add_argument(one, index, dnnl_primitive_desc_query_md(pd, dnnl_query_exec_arg_md, index), error)) goto failed;
  }
  if (add_argument(one, DNNL_ARG_DST, dnnl_primitive_desc_query_md(pd, dnnl_query_dst_md, 0), error)) goto failed;
  if (s.given != NULL && make_repack(one, &s, error)) goto failed;
  one->bytes = dnnl_memory_desc_get_size(dnnl_primitive_desc_query_md(pd, dnnl_query_dst_md, 0));
  one->operands = one->count;
  const_dnnl_memory_desc_t scratch = dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0);
  size_t size = scratch != NULL ? dnnl_memory_desc_get_size(scratch) : 0;
  if (size > 0) {
    if (add_argument(one, DNNL_ARG_SCRATCHPAD, scratch, error)) goto failed;
    if (posix_memalign(&one->scratch, 64, size)) {
      snprintf(error, MESSAGE, "oneDNN: no memory for %zu bytes of scratchpad", size);
      goto failed;
    }
    CHECK(dnnl_memory_set_data_handle(one->args[one->count - 1].memory, one->scratch), "scratchpad");
  }
  result = 0;
failed:
  dnnl_primitive_desc_destroy(pd);
  return result;
}

/* A convolution that nobody else runs at present. */
static Instance *acquire(const char *text, int threads, char *error) {
  unsigned bucket = (unsigned)(((uintptr_t)text >> 4) ^ ((uintptr_t)text >> 12)) % BUCKETS;
  Instance *one = NULL;
  pthread_mutex_lock(&instances_lock);
  for (one = instances[bucket]; one != NULL; one = one->next)
    if (one->text == text && one->threads == threads && !atomic_load(&one->busy)) break;
  if (one != NULL) atomic_store(&one->busy, 1);
  pthread_mutex_unlock(&instances_lock);
  if (one != NULL) return one;
  one = calloc(1, sizeof *one);
  if (one == NULL) return NULL;
  one->text = text;
  one->threads = threads;
  one->busy = 1;
  if (make(one, error)) return NULL;
  pthread_mutex_lock(&instances_lock);
  one->next = instances[bucket];
  instances[bucket] = one;
  pthread_mutex_unlock(&instances_lock);
  return one;
}

typedef struct {
  const char *text;
  void *pointers[MAX_POINTERS];
  int count;
  int failed;
  Team team;
  char error[MESSAGE];
} Run;

static void convolve(Run *run, int threads) {
  char *error = run->error;
  Instance *one = acquire(run->text, threads, error);
  run->failed = 1;
  if (one == NULL) return;
  if (one->sum > 0 && run->count > one->sum) {
    void *result = run->pointers[--run->count];
    memcpy(result, run->pointers[one->sum], one->bytes);
    for (int i = one->sum; i + 1 < run->count; i++) run->pointers[i] = run->pointers[i + 1];
    run->pointers[run->count - 1] = result;
  }
  if (one->operands != run->count) {
    snprintf(error, MESSAGE, "oneDNN: %d operands, expected %d", run->count, one->operands);
    goto failed;
  }
  for (int i = 0; i < one->operands; i++)
    CHECK(dnnl_memory_set_data_handle(one->args[i].memory, run->pointers[i]), "operand");
  if (one->repack != NULL) {
    void *packed = NULL;
    dnnl_exec_arg_t args[2] = {{DNNL_ARG_FROM, one->plain}, {DNNL_ARG_TO, one->packed}};
    CHECK(dnnl_memory_set_data_handle(one->plain, run->pointers[1]), "weights");
    CHECK(dnnl_primitive_execute(one->repack, one->stream, 2, args), "reorder");
    CHECK(dnnl_memory_get_data_handle(one->packed, &packed), "weights");
    CHECK(dnnl_memory_set_data_handle(one->args[1].memory, packed), "weights");
  }
  CHECK(dnnl_primitive_execute(one->primitive, one->stream, one->count, one->args), "execution");
  CHECK(dnnl_stream_wait(one->stream), "execution");
  run->failed = 0;
failed:
  atomic_store(&one->busy, 0);
}

static int task(int id, GroupEnv *env, void *data) {
  Run *run = (Run *)data;
  if (id > 0) {
    serve(&run->team, id);
    return 0;
  }
  run->team.size = env->num_task;
  Member me = {env->num_task > 1 ? &run->team : NULL, 0, 1, 0, env->num_task, 0, 0, 0, 0};
  enter(&me);
  convolve(run, env->num_task);
  enter(NULL);
  atomic_store_explicit(&run->team.closed, 1, memory_order_release);
  return 0;
}

/* Says what went wrong; the caller raises an error of its own. */
static int complain(const char *message) {
  fprintf(stderr, "layoutsearch: %s\n", message);
  return -1;
}

/* Computes `text` on data, packed weights[, bias][, operands of post-ops in order], result: `count` of the pointers. */
int layoutsearch_onednn_conv(const char *text, int count, void *a, void *b, void *c, void *d, void *e, void *f, void *g,
                             void *h) {
  static _Atomic int started;
  void *pointers[MAX_POINTERS] = {a, b, c, d, e, f, g, h};
  Run run;
  memset(&run, 0, sizeof run);
  run.text = text;
  run.count = count;
  memcpy(run.pointers, pointers, sizeof pointers);
  GroupEnv alone = {NULL, 1};
  /* Bound to libgomp, oneDNN has threads of its own. */
  int foreign = atomic_load(&started) && !atomic_load(&SHARED.bound);
  if (TVMBackendParallelLaunch == NULL || foreign)
    task(0, &alone, &run);
  else if (TVMBackendParallelLaunch(task, &run, 0))
    return -1;
  atomic_store(&started, 1);
  return run.failed ? complain(run.error) : 0;
}

/* ---- Weights ---- */

static int reorder(const Spec *s, const void *plain, void *packed, char *error) {
  dnnl_memory_desc_t from = NULL, to = NULL;
  dnnl_primitive_desc_t pd = NULL;
  dnnl_primitive_t primitive = NULL;
  dnnl_stream_t stream = NULL;
  dnnl_memory_t source = NULL, target = NULL;
  int result = -1;
  CHECK(describe_weights(s, s->groups > 1 ? dnnl_abcde : dnnl_abcd, &from), "weights");
  CHECK(describe_weights(s, tag_of(s->weights), &to), "layout of the weights");
  CHECK(dnnl_reorder_primitive_desc_create(&pd, from, engine(), to, engine(), NULL), "reorder");
  CHECK(dnnl_primitive_create(&primitive, pd), "reorder");
  CHECK(dnnl_stream_create(&stream, engine(), dnnl_stream_default_flags), "stream");
  CHECK(dnnl_memory_create(&source, from, engine(), (void *)plain), "memory");
  CHECK(dnnl_memory_create(&target, to, engine(), packed), "memory");
  dnnl_exec_arg_t args[2] = {{DNNL_ARG_FROM, source}, {DNNL_ARG_TO, target}};
  CHECK(dnnl_primitive_execute(primitive, stream, 2, args), "reorder");
  CHECK(dnnl_stream_wait(stream), "reorder");
  result = 0;
failed:
  if (source != NULL) dnnl_memory_destroy(source);
  if (target != NULL) dnnl_memory_destroy(target);
  if (stream != NULL) dnnl_stream_destroy(stream);
  if (primitive != NULL) dnnl_primitive_destroy(primitive);
  if (pd != NULL) dnnl_primitive_desc_destroy(pd);
  if (from != NULL) dnnl_memory_desc_destroy(from);
  if (to != NULL) dnnl_memory_desc_destroy(to);
  return result;
}

/* Packs weights, (O, I / groups, H, W), for the convolution of `text`. */
int layoutsearch_onednn_pack(const char *text, const void *plain, void *packed) {
  char error[MESSAGE];
  Spec s;
  if (parse(text, &s, error) || reorder(&s, plain, packed, error)) return complain(error);
  return 0;
}

/* The same for the compiler's process; a message in `error` (MESSAGE bytes) and -1 where it fails. */
int layoutsearch_onednn_pack_weights(const char *text, const void *plain, void *packed, char *error) {
  Spec s;
  return parse(text, &s, error) ? -1 : reorder(&s, plain, packed, error);
}

/* How oneDNN computes a convolution whose weights may be in any layout: that layout (40 bytes), bytes, implementation. */
int layoutsearch_onednn_choose(const char *text, int threads, char *weights, long *bytes, char *how, char *error) {
  Spec s;
  dnnl_primitive_desc_t pd = NULL;
  dnnl_memory_desc_t md = NULL;
  int result = -1;
  Member me = {NULL, 0, 1, 0, threads, 0, 0, 0, 0};
  if (parse(text, &s, error)) return -1;
  Member *before = self();
  enter(&me);
  if (describe(&s, &pd, error)) goto failed;
  const_dnnl_memory_desc_t chosen = dnnl_primitive_desc_query_md(pd, dnnl_query_weights_md, 0);
  const char *name = NULL;
  CHECK(dnnl_primitive_desc_query(pd, dnnl_query_impl_info_str, 0, &name), "implementation");
  snprintf(how, MESSAGE, "%s", name);
  name = how;
  *bytes = (long)dnnl_memory_desc_get_size(chosen);
  for (int tag = dnnl_format_tag_any + 1; tag < dnnl_format_tag_last; tag++) {
    if (describe_weights(&s, (dnnl_format_tag_t)tag, &md) != dnnl_success) continue;
    int same = dnnl_memory_desc_equal(md, chosen);
    dnnl_memory_desc_destroy(md);
    if (!same) continue;
    /* Of 1 x 1 kernels several names are the same memory, and not every one finds the implementation again. */
    dnnl_primitive_desc_t again = NULL;
    const char *found = NULL;
    snprintf(s.weights, sizeof s.weights, "%s", dnnl_fmt_tag2str((dnnl_format_tag_t)tag));
    if (describe(&s, &again, error)) continue;
    same = dnnl_primitive_desc_query(again, dnnl_query_impl_info_str, 0, &found) == dnnl_success && !strcmp(found, name);
    dnnl_primitive_desc_destroy(again);
    if (same) {
      snprintf(weights, 40, "%s", s.weights);
      result = 0;
      break;
    }
  }
  if (result) snprintf(error, MESSAGE, "oneDNN: the layout of the weights of %s has no name", how);
failed:
  if (pd != NULL) dnnl_primitive_desc_destroy(pd);
  enter(before);
  return result;
}
